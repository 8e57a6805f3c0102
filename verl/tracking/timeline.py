"""Timed spans; and busy time, waiting time and data transfer of every role, one line per step in timeline.jsonl.

    {"step": 3, "of": 100, "start": 1763.2, "seconds": 12.4,
     "phases": {"rollout": 7.1, "reward": 0.3, "training": 4.2, "other": 0.8},
     "roles": {"rollout": {"busy_s": 7.1, "waiting_s": 5.3, "utilisation": 0.57}, ...},
     "communication": {"seconds": 0.4, "bytes": 541065216}}

`phases` is the time of the program, and adds up to the step; roles that work in parallel may be busy for longer in total. A
step's time starts at the end of the step before, so validation and saving count for the step that they follow.
"""

import contextlib
import logging
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from verl.parallel.traffic import TRAFFIC, Traffic
from verl.tracking.files import (
    SHOWN_BYTES,
    Json,
    Row,
    append_rows,
    each,
    has,
    is_count,
    is_number,
    maybe,
    read_json_rows,
)
from verl.tracking.heartbeat import Heartbeat

PLAN = "plan.json"  # `verl plan --json`, in a run folder
PLANNED = "planned.jsonl"  # steps as `verl plan` has simulated them, in a run folder, with the rows of timeline.jsonl

SHARE = 4  # a row has about a quarter of the bytes of a row of metrics
_NUM_NEWEST = 20

SpanPhases = Mapping[str, tuple[str, str | None]]  # span -> (phase of the step, role that is busy in it, or None)

ROW = has(
    step=is_count, of=maybe(is_count), seconds=is_number, phases=each(is_number), roles=each(has(busy_s=is_number)),
    communication=has(seconds=is_number, bytes=is_number),
)  # fmt: skip

# spans of the host; a program adds its own
_HOST_SPANS: SpanPhases = {"testing": ("validation", None), "save_checkpoint": ("saving", None)}


class Timeline:
    """Writes the timeline. `spans` are the phases of the program's spans. `busy` is thread-safe; `write` is for one thread."""

    def __init__(
        self, path: Path, total_steps: int | None = None, *, spans: SpanPhases | None = None, traffic: Traffic = TRAFFIC
    ):
        self._path = path
        self._total_steps = total_steps
        self._traffic = traffic
        self._spans = {**(spans or {}), **_HOST_SPANS}
        self._lock = threading.Lock()
        self._busy: dict[str, float] = {}
        self._began = time.time()

    def busy(self, role: str, seconds: float) -> None:
        """Add seconds that `role` worked in parallel: in another thread, process or device (their mean, if several)."""
        with self._lock:
            self._busy[role] = self._busy.get(role, 0.0) + seconds

    def write(self, step: int, spans: Iterable[Mapping[str, object]]) -> None:
        """Append the line of `step`, from the spans that ended in it."""
        now = time.time()
        start, self._began = self._began, now
        with self._lock:
            elsewhere, self._busy = self._busy, {}
        exchanged = self._traffic.take()
        row = {
            "step": step,
            "of": self._total_steps,
            "start": round(start, 3),
            **summarise(spans, now - start, elsewhere, self._spans),
            "communication": {"seconds": exchanged.seconds, "bytes": exchanged.num_bytes},
        }
        append_rows(self._path, [row])


def read_timeline(path: Path, limit: int = sys.maxsize) -> Iterator[Row]:
    """The rows of timeline.jsonl; `limit` as in `read_metrics`, for about as many steps."""
    return read_json_rows(path, ROW, limit // SHARE)


def expected_step_s(folder: Path) -> float | None:
    """Median seconds of the newest steps in a run folder, or of the steps that `verl plan` has simulated for it; None without
    either."""
    for name in ("timeline.jsonl", PLANNED):
        if rows := list(read_timeline(folder / name, SHOWN_BYTES))[-_NUM_NEWEST:]:
            return float(statistics.median(row["seconds"] for row in rows))
    return None


def summarise(
    spans: Iterable[Json],
    seconds: float,
    elsewhere: Mapping[str, float] | None = None,
    span_phases: SpanPhases = _HOST_SPANS,
) -> dict[str, object]:
    """`seconds`, `phases` and `roles` of a time with these spans (a span with a parent counts in its parent) and the busy
    seconds of roles that worked `elsewhere`. Spans without a phase count as "other"."""
    phases: dict[str, float] = {}
    busy: dict[str, float] = dict(elsewhere or {})
    for span in spans:
        if span.get("parent") is not None:
            continue
        phase, role = span_phases.get(span["name"], ("other", None))
        phases[phase] = phases.get(phase, 0.0) + span["seconds"]
        if role is not None and role not in (elsewhere or {}):
            busy[role] = busy.get(role, 0.0) + span["seconds"]
    phases["other"] = phases.get("other", 0.0) + max(seconds - sum(phases.values()), 0.0)
    roles = {
        role: {
            "busy_s": worked,
            "waiting_s": max(seconds - worked, 0.0),
            "utilisation": min(worked / seconds, 1.0) if seconds > 0 else 0.0,
        }
        for role, worked in busy.items()
    }
    return {"seconds": seconds, "phases": phases, "roles": roles}


log = logging.getLogger(__name__)


class Spans:
    """Times `with` blocks. They may nest. `on_enter` is called with the name of each at its start.

    With a `path`, `write` appends a line per span: name, parent, start (seconds since 1970), seconds and step; a `timeline`
    gets its line of the step at the same time. A `heartbeat` shows the step and span that have started, at once. For one
    thread.
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
        """Seconds per name since the last call, in the order of the first ends of the names. A span includes the spans inside
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


def duration(seconds: float | None) -> str:
    """ "0.31 s", "3.2 s", "45 s", "4 min 10 s", "2 h 5 min", "3 d 4 h"; "" for None."""
    if seconds is None:
        return ""
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours or minutes:
        small = f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
        return small if hours < 48 else f"{hours // 24} d {hours % 24} h"
    return f"{rest} s" if seconds >= 9.95 else f"{seconds:.1f} s" if seconds >= 1 else f"{max(seconds, 0):.2g} s"


def throughput(num_tokens: int, step_s: float, num_devices: int) -> dict[str, float]:
    """perf/total_num_tokens (prompt and response tokens of all rows), perf/time_per_step in seconds, and
    perf/throughput in tokens per second and device."""
    return {
        "perf/total_num_tokens": num_tokens,
        "perf/time_per_step": step_s,
        "perf/throughput": num_tokens / (step_s * num_devices),
    }
