"""Functions of users as tools, in the sandboxed processes of reward functions: the same limits, the same ends of what hangs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.agents.images import text_and_images
from verl.data_proto.media import VideoSource
from verl.data_proto.samples import Score, ScoreRequest
from verl.rewards.functions import RewardFunctionSpec, finished
from verl.rewards.managers.build import build_pool
from verl.rewards.pool import RewardPool
from verl.tools.function_tool import answer_of
from verl.tools.tool_registry import load_function_tools

if TYPE_CHECKING:
    from verl.config import RewardConfig

MAX_TEXT = 30_000  # characters of an answer; of a longer one both ends
_FAULT = "The reward function call_tool of pkg://verl.agents.sandboxed "


class SandboxedFunctions:
    """Runs functions of users as tools: one process runs one call at a time; further processes start as calls wait."""

    def __init__(self, reward: RewardConfig, *, timeout_s: float, log_dir: Path | None = None):
        section = dataclasses.replace(reward, debug=False, timeout_s=timeout_s, process_per_sample=False)
        pool = build_pool(section, log_dir=log_dir)
        assert isinstance(pool, RewardPool)
        pool.function = RewardFunctionSpec("pkg://verl.agents.sandboxed", "call_tool")
        self.pool, self._numbers = pool, itertools.count()

    def submit(self, path: str, name: str, arguments: Mapping[str, object]) -> Future[dict[str, Any]]:
        """The future of the result: {"text", "images", "videos", "reward", "metrics"}, or {"error"}."""
        request = ScoreRequest(
            f"tool/{next(self._numbers)}", name, "", None, {"path": path, "arguments": dict(arguments)}
        )
        done: Future[dict[str, Any]] = Future()
        scored = self.pool.submit([request])

        def finish(scores: Future[list[Score]]) -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(_answer(scores.result()[0]))
            except Exception as error:  # noqa: BLE001 - handed to the one who waits
                done.set_exception(error)

        scored.add_done_callback(finish)
        return done

    def close(self) -> None:
        self.pool.close()


def _answer(score: Score) -> dict[str, object]:
    if score.error is not None:
        why = score.error.removeprefix(_FAULT).split(", for sample tool/")[0]
        return {"error": why.replace("reward.timeout_s", "multi_turn.tool_timeout_s")}
    parts = score.parts
    if "failure" in parts:
        return {"error": parts["failure"]}
    return {"reward": score.score, **{name: parts[name] for name in ("text", "images", "videos", "metrics")}}


def call_tool(data_source: str, solution_str: str, ground_truth: object, extra_info: Any = None) -> dict[str, object]:
    """Call the tool `data_source` of the file `extra_info["path"]`; runs inside of the sandbox."""
    tools = load_function_tools(extra_info["path"])
    # a schema may give another name, and takes long to make
    tool = next((t for t in tools if t.name == data_source), None) or next(
        t for t in tools if t.tool_schema.function.name == data_source
    )
    try:
        returned = finished(tool.function(**tool.values(extra_info["arguments"])))
        response, reward, metrics = answer_of(returned)
        from verl.data.pictures import image_text, video_entry

        text, sources = text_and_images(response)
        places = [(source, f"image {number}") for number, source in enumerate(sources)]
        images = [image_text(source, place) for source, place in places if not isinstance(source, VideoSource)]
        videos = [video_entry(source, place) for source, place in places if isinstance(source, VideoSource)]
    except Exception as error:  # noqa: BLE001 - the model gets the error
        return {"score": 0.0, "failure": f"{error}"[:500] or type(error).__name__}
    if len(text) > MAX_TEXT:
        text = f"{text[: MAX_TEXT // 2]}{text[-MAX_TEXT // 2 :]}"
    return {"score": reward, "text": text, "images": images, "videos": videos, "metrics": metrics}
