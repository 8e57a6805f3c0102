"""This machine's accelerator, the environment of Ray workers, traces and memory lines: `verl.utils.device`,
`verl.utils.memory_utils`, `verl.utils.profiler`."""

import functools
import gc
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

import torch

from verl.parallel.trace import Trace

log = logging.getLogger(__name__)

is_cuda_available: bool = torch.cuda.is_available()
is_npu_available: bool = False  # no engine here computes on one


def get_device_name() -> str:
    """ "cuda" if there is a GPU, else "cpu"."""
    return "cuda" if is_cuda_available else "cpu"


def get_torch_device() -> ModuleType:
    """The module of torch for that device: `torch.cuda` or `torch.cpu`."""
    return torch.cuda if is_cuda_available else torch.cpu


def get_device_id() -> Any:
    """The current device as torch names it: an index on GPUs, "cpu" on a CPU."""
    return get_torch_device().current_device()


def get_nccl_backend() -> str:
    """The communication backend of that device: "nccl" for GPUs, "gloo" for a CPU."""
    return "nccl" if is_cuda_available else "gloo"


def get_visible_devices_keyword() -> str:
    """The environment variable that restricts a process to some devices."""
    return "CUDA_VISIBLE_DEVICES"


def auto_set_device(config: object) -> None:
    """Set `config.trainer.device` to this machine's device if it names another accelerator; "cpu" and "auto" stay."""
    trainer: Any = getattr(config, "trainer", None)
    chosen = getattr(trainer, "device", None)
    if chosen in (None, "cpu", "auto", get_device_name()):
        return
    log.warning("trainer.device=%s is not on this machine; it is set to %s.", chosen, get_device_name())
    trainer.device = get_device_name()


def set_expandable_segments(enable: bool) -> None:
    """Turn expandable segments of CUDA's allocator on or off. No effect on a CPU."""
    if is_cuda_available:
        torch.cuda.memory._set_allocator_settings(f"expandable_segments:{enable}")


def aggressive_empty_cache(force_sync: bool = True, max_retries: int = 3) -> None:
    """Free cached device memory, at most `max_retries` rounds that free 1 GiB; on a CPU only collect garbage."""
    for _ in range(max_retries):
        gc.collect()
        if not is_cuda_available:
            return
        before = torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        if force_sync:
            torch.cuda.synchronize()
        if before - torch.cuda.memory_reserved() < 2**30:
            return


# settings of libraries that all processes of a run should share; the Ray runtime here sets its own
F = TypeVar("F", bound=Callable[..., object])

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
    """A trace of this rank between `start` and `stop`: `save_path`/{role}_rank_{rank}.json, for Perfetto and Chrome."""

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
