"""A trace of this process by torch.profiler, a file that Perfetto and Chrome open; and a snapshot of its GPU memory, a file
that pytorch.org/memory_viz opens."""

import logging
from pathlib import Path

import torch

log = logging.getLogger(__name__)

_MAX_EVENTS = 100_000  # allocations that a snapshot remembers, each with its stack


class Trace:
    """One trace at a time; there is one profiler in a process."""

    def __init__(self) -> None:
        self._running: torch.profiler.profile | None = None
        self._path = Path()
        self._records_memory = False

    def start(self, path: Path, *, memory: bool = False) -> None:
        """Begin the trace that `stop` will write to `path`, with `memory` also STEM_memory.pickle; nothing while one is being
        made."""
        if self._running is not None:
            return
        self._records_memory = memory and torch.cuda.is_available()
        if memory and not self._records_memory:
            log.warning(
                "There is no snapshot of memory, since this process has no CUDA GPU; the trace %s is written.", path
            )
        if self._records_memory:
            torch.cuda.memory._record_memory_history(max_entries=_MAX_EVENTS)
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
        if self._records_memory:
            torch.cuda.memory._dump_snapshot(str(self._path.with_name(f"{self._path.stem}_memory.pickle")))
            torch.cuda.memory._record_memory_history(enabled=None)


OF_PROCESS = Trace()
