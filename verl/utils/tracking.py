"""Door: `Tracking` as existing recipes use it; the trackers live in verl.tracking.sinks."""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from verl.config.secrets import hide_values
from verl.tracking.sinks.api import RunInfo, make_sink
from verl.tracking.sinks.guard import Guard

_open: dict[str, Guard] = {}  # the newest tracker of each name in this process


class Tracking:
    """Metrics to the named trackers. A tracker that fails is switched off and does not hurt the caller."""

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: str | list[str] = "console",
        config: Mapping[str, Any] | None = None,
    ):
        names = [default_backend] if isinstance(default_backend, str) else list(default_backend)
        info = RunInfo(Path.cwd(), project_name, experiment_name, hide_values(dict(config or {})))
        self.logger = {name: Guard(name, sink) for name, sink in [(n, make_sink(n, info)) for n in names]}
        _open.update(self.logger)
        atexit.register(self.close)  # recipes rarely close it, and what is on its way would be lost

    def log(self, data: Mapping[str, Any], step: int, backend: str | list[str] | None = None) -> None:
        """Hand `data` to all trackers, or to those named."""
        wanted = [backend] if isinstance(backend, str) else backend
        for name, guard in self.logger.items():
            if wanted is None or name in wanted:
                guard.log(dict(data), step)

    def close(self) -> None:
        """Wait until the trackers have sent what they were given."""
        guards, self.logger = self.logger, {}
        for name, guard in guards.items():
            if _open.get(name) is guard:
                del _open[name]
            guard.close()

    def __enter__(self) -> Tracking:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ValidationGenerationsLogger:
    """Samples of a validation as a table in the named trackers: those of the newest Tracking of this process, else its own."""

    def __init__(self, project_name: str | None = None, experiment_name: str | None = None):
        self.project_name = project_name or "verl"
        self.experiment_name = experiment_name or "validation"
        self._own: list[Tracking] = []

    def log(self, loggers: str | Sequence[str], samples: Sequence[Sequence[Any]], step: int) -> None:
        """`samples` are [input, output, score] or [input, output, ground truth, score]."""
        names = [loggers] if isinstance(loggers, str) else list(loggers)
        missing = [name for name in names if name not in _open]
        if missing:
            self._own.append(Tracking(self.project_name, self.experiment_name, missing))
        for name in names:
            _open[name].table("val/generations", [_columns(sample) for sample in samples], step)


def _columns(sample: Sequence[Any]) -> dict[str, Any]:
    names = ("input", "output", "score") if len(sample) == 3 else ("input", "output", "ground_truth", "score")
    return dict(zip(names, sample, strict=True))
