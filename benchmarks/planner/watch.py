"""Processes of a run from outside: the most memory of each, and how long each waited for a core that others had.

with Watch() as watch:
    subprocess.run(...)
rank, = watch.largest(1)
watch.peaks[rank], watch.waited(rank, start, end)        bytes; seconds
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

import numpy as np
from child import descendants, high_water_mark

_EVERY_S = 0.1
_WAITING_BYTES = 200_000_000  # smaller processes compute nothing that is measured


class Watch:
    """Samples the processes below this one, in a thread, while it is open."""

    def __init__(self) -> None:
        self.peaks: dict[int, int] = {}
        self._waits: dict[int, list[tuple[float, float]]] = {}  # (time, seconds waited so far)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join(timeout=10)

    def largest(self, count: int) -> list[int]:
        """The processes with the most memory."""
        return sorted(self.peaks, key=lambda pid: -self.peaks[pid])[:count]

    def waited(self, pid: int, start: float, end: float) -> float:
        """Seconds between two times (of time.time) in which threads of the process were ready to run and had no core. With one
        computing thread, the remaining time is the time of the work itself."""
        times, waits = zip(*self._waits[pid], strict=True)
        before, after = np.interp([start, end], times, waits)
        return float(after - before)

    def _watch(self) -> None:
        while not self._end.wait(_EVERY_S):
            for pid in descendants(os.getpid()):
                self.peaks[pid] = max(self.peaks.get(pid, 0), high_water_mark(pid))
                if self.peaks[pid] > _WAITING_BYTES:
                    self._waits.setdefault(pid, []).append((time.time(), _waited_s(pid)))


def _waited_s(pid: int) -> float:
    """Of all threads that a process has, see proc(5), schedstat."""
    total = 0
    with contextlib.suppress(OSError):  # a process or a thread that has just ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                total += int((task / "schedstat").read_text().split()[1])
    return total / 1e9
