"""Timed spans of a step.

spans = Spans(folder.spans, on_enter=console.phase)
with spans("gen"): ...
spans.take()  # {"gen": 1.93}
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from verl.tracking.files import append_rows
from verl.tracking.heartbeat import Heartbeat
from verl.tracking.timeline import Timeline

log = logging.getLogger(__name__)


class Spans:
    """Times `with` blocks, which may nest. `on_enter` is called with the name of each at its start.

    With a `path`, `write` appends a line per span: name, parent, start (seconds since 1970), seconds and step; a `timeline`
    gets its line of the step at the same time. A `heartbeat` shows at once which step and span have started. For one thread.
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
        self._rows: list[dict[str, object]] = []

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
            log.debug("%s took %.3f s", name, seconds)
            if not repeated:  # a span inside one of the same name is counted there
                self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            if self._path is not None or self.timeline is not None:
                self._rows.append({"name": name, "parent": parent, "start": round(start, 6), "seconds": seconds})

    def begin_step(self, step: int) -> None:
        """Start of step `step`."""
        if self._heartbeat is not None:
            self._heartbeat.begin_step(step)

    def take(self) -> dict[str, float]:
        """Seconds per name since the last call, in the order in which the names first ended. A span includes the spans inside
        it. An open span counts when it ends."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def write(self, step: int) -> None:
        """Append the spans that ended since the last call to the file, as spans of `step`."""
        rows, self._rows = self._rows, []
        if self._path is not None and rows:
            append_rows(self._path, ({"step": step, **row} for row in rows))
        if self.timeline is not None:
            self.timeline.write(step, rows)


def span_metrics(spans: Mapping[str, float], tokens: Mapping[str, int]) -> dict[str, float]:
    """timing_s/{span}, and timing_per_token_ms/{span} for the spans in `tokens`."""
    metrics = {f"timing_s/{name}": seconds for name, seconds in spans.items()}
    for name, count in tokens.items():
        if name in spans and count:
            metrics[f"timing_per_token_ms/{name}"] = spans[name] * 1000 / count
    return metrics


def throughput(num_tokens: int, step_s: float, num_devices: int) -> dict[str, float]:
    """perf/total_num_tokens (prompt and response tokens of all rows), perf/time_per_step in seconds, and
    perf/throughput in tokens per second and device."""
    return {
        "perf/total_num_tokens": num_tokens,
        "perf/time_per_step": step_s,
        "perf/throughput": num_tokens / (step_s * num_devices),
    }
