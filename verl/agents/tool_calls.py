"""Calls of tools, with a time limit, a length limit for answers, and an answer for each kind of failure."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from verl.agents.episode import Episode, EpisodeError
from verl.agents.images import EpisodeImages, text_and_images
from verl.agents.journal import TOOL, Journal, call_digest
from verl.data_proto.media import Media
from verl.foreign_text import clean
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import FunctionTool, answer_of
from verl.tools.hints import fitted_object
from verl.tools.schemas import MAX_NAME, FunctionCall, ToolResponse

if TYPE_CHECKING:
    from verl.agents.sandboxed import SandboxedFunctions

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ToolSettings:
    """`max_length`: characters of an answer, cut at `side`; `timeout_s`: seconds of a call."""

    timeout_s: float = 60.0
    max_length: int = 256
    side: str = "middle"


@dataclass
class ToolResult:
    """The answer of a call, as the model reads it. `error`: why the call failed, or None."""

    name: str
    text: str
    media: list[Media] = field(default_factory=list)  # images
    reward: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0
    replayed: bool = False


class ToolCalls:
    """The tools of a run. `pool` runs functions of files, if there is one; else they run here, on a thread."""

    def __init__(
        self,
        tools: Sequence[BaseTool],
        settings: ToolSettings,
        journal: Journal | None = None,
        pool: SandboxedFunctions | None = None,
        images: EpisodeImages | None = None,
    ):
        self.tools = {tool.name: tool for tool in tools}
        self.settings, self.journal, self.pool = settings, journal or Journal(None), pool
        self.images = images or EpisodeImages(None, None)

    def schemas(self, names: Sequence[str] | None = None) -> list[dict[str, object]]:
        """The tools (with `names`, only the named tools) as chat templates read them."""
        return [t.tool_schema.for_template() for name, t in self.tools.items() if names is None or name in names]

    async def call(
        self,
        episode: Episode,
        call: FunctionCall,
        *,
        names: Sequence[str] | None = None,
        kwargs: Mapping[str, object] | None = None,
        agent_data: object = None,
    ) -> ToolResult:
        """The result of a call, never an exception. `names` are the tools that the row may call; `kwargs` its tools_kwargs."""
        number, context = episode.num_calls, episode.digest()
        episode.num_calls += 1
        task, digest = episode.task, call_digest(call.name, call.arguments, context)
        records = not task.split.startswith("val")  # every validation has the same step number
        recorded = self.journal.result(task.split, task.name, number, digest) if records else None
        if recorded is not None:
            media = await self.images.stored(recorded["result"].get("media") or [])
            return ToolResult(**{**recorded["result"], "media": media, "replayed": True})
        started_at = time.perf_counter()
        episode.num_unrecorded += 1
        outcome = await self._called(episode, call, names, dict(kwargs or {}), agent_data)
        outcome.seconds = time.perf_counter() - started_at
        of = None if outcome.error else f"The tool {outcome.name}"
        outcome.text = truncated(outcome.text, self.settings.max_length, self.settings.side, of)
        if outcome.error is not None:
            log.debug("Episode %s, call %d of %s: %s", task.name, number, clean(call.name, MAX_NAME), outcome.error)
        if records:
            result = {"name": outcome.name, "text": outcome.text, "reward": outcome.reward, "metrics": outcome.metrics}
            result |= {"error": outcome.error, "seconds": outcome.seconds}
            result |= {"media": [images.digest for images in outcome.media]} if outcome.media else {}
            episode.num_unrecorded -= self.journal.write(
                TOOL, split=task.split, episode=task.name, call=number, digest=digest, result=result,
                arguments=call.arguments[:2000],
            )  # fmt: skip
        return outcome

    async def _called(
        self,
        episode: Episode,
        call: FunctionCall,
        names: Sequence[str] | None,
        kwargs: dict[str, object],
        agent_data: object,
    ) -> ToolResult:
        name = clean(call.name, MAX_NAME)
        allowed = [n for n in self.tools if names is None or n in names]
        if call.error is None and call.name not in allowed:
            return _failed(name, f"Unknown function '{name}'. Available tools: [{', '.join(allowed)}]")
        if fault := call.fault():
            return _failed(name, fault)
        tool = self.tools[call.name]
        try:
            arguments = fitted_object(call.parsed(), tool.tool_schema.function.parameters.model_dump())
            work = self._execute(episode, tool, arguments, kwargs, agent_data)
            # the pool has the limit of a call itself: here it would count the time that the call waits for a process
            limit_s = self.settings.timeout_s if self._pool_of(tool) is None else None
            response, reward, metrics = await asyncio.wait_for(work, limit_s)
            text, sources = text_and_images(response)
            media = await self.images.read(sources, "its answer")
            return ToolResult(name, text, media, reward, _plain(metrics))
        except asyncio.TimeoutError:
            return _failed(name, f"Error executing tool '{name}': it took longer than {self.settings.timeout_s:g} s")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - tools are code of the user's and may raise anything
            return _failed(name, f"Error executing tool '{name}': {clean(error, 300) or type(error).__name__}")

    def _pool_of(self, tool: BaseTool) -> SandboxedFunctions | None:
        return self.pool if isinstance(tool, FunctionTool) and tool.path is not None else None

    async def _execute(
        self, episode: Episode, tool: BaseTool, arguments: dict[str, object], kwargs: dict[str, Any], agent_data: object
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        if isinstance(tool, FunctionTool):
            tool.signature.bind(**arguments)  # TypeError names what does not fit
            if (pool := self._pool_of(tool)) is not None:
                done = await asyncio.wrap_future(pool.submit(str(tool.path), tool.name, arguments))
                if "error" in done:
                    raise RuntimeError(done["error"])
                return ToolResponse(done["text"], done["images"], done["videos"]), done["reward"], done["metrics"]
            return answer_of(await on_thread(tool.function, **tool.values(arguments)))
        instance_id, _ = await on_thread(tool.create, create_kwargs=kwargs.get("create_kwargs", {}))
        try:
            execute_kwargs = kwargs.get("execute_kwargs", {})
            returned = await on_thread(tool.execute, instance_id, arguments, agent_data=agent_data, **execute_kwargs)
        finally:
            await on_thread(tool.release, instance_id, **kwargs.get("release_kwargs", {}))
        return answer_of(returned)


def not_run(call: FunctionCall, limit: int) -> ToolResult:
    """The answer to a call beyond the first `limit` of a turn."""
    return _failed(
        clean(call.name, MAX_NAME), f"Not run: of the calls of one turn, at most {limit} run. Call it again."
    )


def _failed(name: str, why: str) -> ToolResult:
    return ToolResult(name, why, error=why)


def _plain(metrics: object) -> dict[str, object]:
    """Metrics as JSON can hold them."""
    return json.loads(json.dumps(metrics, default=str)) if isinstance(metrics, dict) else {}


async def on_thread(function: Callable[..., object], /, *args: object, **kwargs: object) -> Any:
    """Await an async function; run a plain one on a thread, and leave that behind when its time is over."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    done: Future[object] = Future()

    def run() -> None:
        try:
            value = function(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - handed to the one who waits
            _finish(done, error=error)
        else:
            _finish(done, value)

    # a daemon: no hanging tool keeps the run from ending
    threading.Thread(target=run, name=f"tool-{getattr(function, '__name__', 'call')}", daemon=True).start()
    value = await asyncio.wrap_future(done)
    return await value if inspect.isawaitable(value) else value


async def bounded(function: Callable[..., object], timeout_s: float, *args: object, **kwargs: object) -> object:
    """`on_thread` for at most `timeout_s` seconds. Raises EpisodeError naming the function."""
    name = getattr(function, "__qualname__", str(function))
    try:
        return await asyncio.wait_for(on_thread(function, *args, **kwargs), timeout_s)
    except asyncio.TimeoutError:
        raise EpisodeError(f"{name} took longer than multi_turn.tool_timeout_s={timeout_s:g} s") from None


def _finish(done: Future[object], value: object = None, error: BaseException | None = None) -> None:
    if done.cancelled() or not done.set_running_or_notify_cancel():
        return
    if error is not None:
        done.set_exception(error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}"))
    else:
        done.set_result(value)


def truncated(text: str, limit: int, side: str, of: str | None = None) -> str:
    """At most `limit` characters of a text and a mark at the cut, with a warning the first time for `of`. `side` is the
    side that is cut, as in data.truncation: left keeps the end, right the beginning, middle both."""
    if len(text) <= limit:
        return text
    if of:
        _warn_of_cut(of, limit)
    if side == "left":
        return f"(truncated)...{text[-limit:]}"
    if side == "right":
        return f"{text[:limit]}...(truncated)"
    half = max(1, limit // 2)
    return f"{text[:half]}...(truncated)...{text[-half:]}"


@functools.cache
def _warn_of_cut(of: str, limit: int) -> None:
    more = "multi_turn.max_tool_response_length"
    log.warning(
        "%s answered with more than %d characters, and the model reads a part. Raise %s for all of it.", of, limit, more
    )
