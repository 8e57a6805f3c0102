"""Door: `Tracking` as existing recipes use it; the trackers live in verl.tracking.sinks."""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from verl.config.secrets import hide_values
from verl.tracking.sinks.api import RunInfo, make_sink
from verl.tracking.sinks.guard import Guard


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
        for guard in guards.values():
            guard.close()

    def __enter__(self) -> Tracking:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
