"""Where the time of a step goes.

spans = Spans(folder.spans, on_enter=console.phase)
with spans("gen"): ...
spans.take()  # {"gen": 1.93}
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from verl.tracking.files import append_rows
from verl.tracking.heartbeat import Heartbeat
from verl.tracking.timeline import Timeline


class Spans:
    """Names stretches of time, nested as the `with` blocks are. `on_enter` hears the name of each as it begins.

    With a `path`, each span becomes a line there: name, parent, start (seconds since 1970), seconds, and the step it is
    of. Lines are written by `write`, not while the clock runs, and a `timeline` gets its line of the step then. A
    `heartbeat` says at once which step and which span has begun. Made for one thread.
    """

    def __init__(
        self,
        path: Path | None = None,
        on_enter: Callable[[str], None] | None = None,
        timeline: Timeline | None = None,
        heartbeat: Heartbeat | None = None,
    ):
        self._path = path
        self.timeline = timeline
        self._heartbeat = heartbeat
        self._on_enter = on_enter
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}
        self._rows: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        parent = self._open[-1] if self._open else None
        repeated = name in self._open
        self._open.append(name)
        if self._on_enter is not None:
            self._on_enter(name)
        if self._heartbeat is not None:
            self._heartbeat.phase(name)
        start, began = time.time(), time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            self._open.pop()
            if not repeated:  # a span inside one of the same name is part of it already
                self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            if self._path is not None or self.timeline is not None:
                self._rows.append({"name": name, "parent": parent, "start": round(start, 6), "seconds": seconds})

    def begin_step(self, step: int) -> None:
        """Step `step` begins."""
        if self._heartbeat is not None:
            self._heartbeat.begin_step(step)

    def take(self) -> dict[str, float]:
        """Seconds per name since the last call, in the order in which the names first ended. A span's seconds include
        those of the spans inside it. Spans that are still open count when they end."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def write(self, step: int) -> None:
        """Append the spans that have ended since the last call to the file, as those of `step`."""
        rows, self._rows = self._rows, []
        if self._path is not None and rows:
            append_rows(self._path, ({"step": step, **row} for row in rows))
        if self.timeline is not None:
            self.timeline.write(step, rows)
