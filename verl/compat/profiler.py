"""Traces, memory lines and timers of scripts: `verl.utils.profiler`. torch.profiler writes the traces."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from verl.parallel.trace import Trace

F = TypeVar("F", bound=Callable[..., object])

log = logging.getLogger(__name__)

_GIB = 2**30


@dataclass
class ProfilerConfig:
    """Ranks that write a trace, and the folder of their files. `tool` and `tool_config` are of other profilers."""

    tool: str | None = None
    enable: bool = False
    all_ranks: bool = False
    ranks: list[int] = field(default_factory=list)
    save_path: str | None = "outputs/profile"
    tool_config: object = None


class DistProfiler:
    """A trace of this rank between `start` and `stop`: `save_path`/{role}_rank_{rank}.json, which Perfetto and Chrome open."""

    def __init__(self, rank: int, config: ProfilerConfig | None = None, tool_config: object = None, **_: object):
        self.rank, self.config = rank, config or ProfilerConfig()
        self._trace = Trace()

    def check_enable(self) -> bool:
        return self.config.enable

    def check_this_rank(self) -> bool:
        return self.config.all_ranks or self.rank in self.config.ranks

    def start(self, *, role: str | None = None, **_: object) -> None:
        """Start, on a rank that the config names."""
        if self.check_enable() and self.check_this_rank():
            folder = Path(self.config.save_path or "outputs/profile")
            self._trace.start(folder / f"{role or 'trace'}_rank_{self.rank}.json")

    def stop(self) -> None:
        """Write the file."""
        self._trace.stop()

    @classmethod
    def annotate(cls, message: str | None = None, **_: object) -> Callable[[Callable[..., Any]], Any]:
        """Decorator: calls appear under their name in a trace."""
        return lambda function: torch.profiler.record_function(message or function.__name__)(function)


class DistProfilerExtension:
    """Mixin of workers: start_profile and stop_profile of a `profiler`."""

    def __init__(self, profiler: DistProfiler):
        self.profiler = profiler

    def start_profile(self, **settings: Any) -> None:
        self.profiler.start(**settings)

    def stop_profile(self) -> None:
        self.profiler.stop()


@contextmanager
def mark_annotate(message: str | None = None, **_: object) -> Iterator[None]:
    """A block under its name in a trace."""
    with torch.profiler.record_function(message or "block"):
        yield


def log_gpu_memory_usage(
    head: str, logger: logging.Logger | None = None, level: int = logging.DEBUG, rank: int = 0
) -> None:
    """Log allocated and reserved memory of the GPU in GiB after `head`, on rank `rank`; nothing without a GPU."""
    if not torch.cuda.is_available() or int(os.environ.get("RANK", "0")) != rank:
        return
    allocated, reserved = torch.cuda.memory_allocated() / _GIB, torch.cuda.memory_reserved() / _GIB
    (logger or log).log(level, "%s: %.2f GiB allocated, %.2f GiB reserved", head, allocated, reserved)


class GPUMemoryLogger:
    """Decorator: log_gpu_memory_usage before and after each call."""

    def __init__(
        self, role: str, logger: logging.Logger | None = None, level: int = logging.DEBUG, log_only_rank_0: bool = True
    ):
        self.role, self.logger, self.level = role, logger, level
        self._rank = 0 if log_only_rank_0 else int(os.environ.get("RANK", "0"))

    def __call__(self, decorated: F) -> F:
        @functools.wraps(decorated)
        def call(*arguments: object, **keywords: object) -> Any:
            name = f"{self.role} {decorated.__name__}"
            log_gpu_memory_usage(f"before {name}", self.logger, self.level, self._rank)
            result = decorated(*arguments, **keywords)
            log_gpu_memory_usage(f"after {name}", self.logger, self.level, self._rank)
            return result

        return cast("F", call)
