"""`core.Core` in a process of its own: what the trainer's side calls, and what is behind it in the other process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from verl.data_proto.samples import Completion, PromptRequest, SamplingParams
from verl.rollout.api import OnFinish
from verl.rollout.process import EngineProcess
from verl.rollout.vllm.core import Core, Figures, Setup
from verl.rollout.vllm.weights import Description

_FACTORY = "verl.rollout.vllm.process:start"


class RemoteCore:
    """The methods of `core.Core`. Raises what they raise, WorkerLostError when the process ends, DeadlineError when it is
    silent for too long."""

    def __init__(self, setup: Setup, *, start_timeout_s: float, call_timeout_s: float, factory: str = _FACTORY):
        self.process = EngineProcess(
            "vLLM",
            factory,
            asdict(setup),
            environment=setup.environment,
            start_timeout_s=start_timeout_s,
            call_timeout_s=call_timeout_s,
        )

    def generate(
        self, prompts: Sequence[PromptRequest], params: SamplingParams, *, step: int, on_finish: OnFinish
    ) -> Figures:
        """See Core.generate."""
        figures: Figures = self.process.call(
            "generate",
            {"prompts": [asdict(p) for p in prompts], "params": asdict(params), "step": step},
            lambda event: on_finish(Completion(**event)),
        )
        return figures

    def try_bucket(self, bucket: Description) -> None:
        """See Core.try_bucket."""
        self.process.call("try_bucket", {"bucket": bucket})

    def begin_update(self) -> None:
        """See Core.begin_update."""
        self.process.call("begin_update", {})

    def update(self, bucket: Description) -> None:
        """See Core.update."""
        self.process.call("update", {"bucket": bucket})

    def finish_update(self, manifest: str) -> None:
        """See Core.finish_update."""
        self.process.call("finish_update", {"manifest": manifest})

    def abandon_update(self) -> None:
        """See Core.abandon_update."""
        self.process.call("abandon_update", {})

    def sleep(self) -> None:
        """See Core.sleep."""
        self.process.call("sleep", {})

    def close(self) -> None:
        """End the process."""
        self.process.close()

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone, by itself or because it was silent."""
        return self.process.has_ended


class ServedCore:
    """A Core whose `generate` takes and gives plain values."""

    def __init__(self, core: Any):
        self.core = core
        self.begin_update: Callable[[], None] = core.begin_update
        self.update: Callable[[Description], None] = core.update
        self.finish_update: Callable[[str], None] = core.finish_update
        self.abandon_update: Callable[[], None] = core.abandon_update
        self.sleep: Callable[[], None] = core.sleep

    def try_bucket(self, bucket: Description) -> None:
        """See Core.try_bucket."""
        self.core.try_bucket(bucket)

    def generate(self, prompts: list[dict[str, Any]], params: dict[str, Any], step: int, report: Any) -> Figures:
        """`report` is told of each sample as it ends, and that the engine goes on."""
        lists = {name: tuple(value) for name, value in params.items() if isinstance(value, list)}
        figures: Figures = self.core.generate(
            [PromptRequest(**{**p, "token_ids": tuple(p["token_ids"])}) for p in prompts],
            SamplingParams(**{**params, **lists}),
            step=step,
            on_finish=lambda done: report(asdict(done)),
            on_step=report.alive,
        )
        return figures


def start(setup: dict[str, Any]) -> ServedCore:
    """What process_main calls."""
    return ServedCore(Core(Setup(**setup)))
