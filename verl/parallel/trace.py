"""A trace of this process by torch.profiler: a file that Perfetto and Chrome open."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

log = logging.getLogger(__name__)


class Trace:
    """One trace at a time; there is one profiler in a process."""

    def __init__(self) -> None:
        self._running: torch.profiler.profile | None = None
        self._path = Path()

    def start(self, path: Path) -> None:
        """Begin the trace that `stop` will write to `path`; nothing while one is being made."""
        if self._running is not None:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._running, self._path = torch.profiler.profile(activities=activities), path
        self._running.start()

    def stop(self) -> None:
        """Write the file; nothing without a trace."""
        if self._running is None:
            return
        running, self._running = self._running, None
        running.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        running.export_chrome_trace(str(self._path))
        log.info("Wrote the trace %s.", self._path)


OF_PROCESS = Trace()
