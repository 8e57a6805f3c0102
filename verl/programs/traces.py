"""Traces of chosen steps, by the ranks of roles with `profiler.enable` (`global_profiler`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from verl.config.sections.profiler import GlobalProfilerConfig, ProfilerConfig
from verl.roles.api import ModelHandle, TraceSpec


class Traces:
    """Starts and stops the traces of `roles`."""

    def __init__(self, config: GlobalProfilerConfig, roles: Sequence[ModelHandle]):
        self.steps, self.joins = set(config.steps or ()), config.profile_continuous_steps
        self.roles = roles

    @contextmanager
    def of(self, step: int) -> Iterator[None]:
        """Inside, step `step` runs; a trace continues into the next step where neighbours share one."""
        if step in self.steps and not (self.joins and step - 1 in self.steps):
            for role in self.roles:
                role.start_trace(f"step_{step}")
        try:
            yield
        except BaseException:
            self._stop()
            raise
        if step in self.steps and not (self.joins and step + 1 in self.steps):
            self._stop()

    def _stop(self) -> None:
        for role in self.roles:
            role.stop_trace()


def trace_spec(profiler: ProfilerConfig, config: GlobalProfilerConfig) -> TraceSpec | None:
    """The ranks of a role that write traces, and where; None without any."""
    if not profiler.enable or not config.steps:
        return None
    ranks = None if profiler.all_ranks else tuple(profiler.ranks or (0,))
    return TraceSpec(Path(config.save_path).expanduser().absolute(), ranks)
