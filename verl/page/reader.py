"""The records of one run folder in memory: metrics, timeline, events, status; growing files are read as the run writes them.

Reading never raises because of the content of the folder: `problems` has a sentence for each file that cannot be used.
"""

import contextlib
import itertools
import os
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl.config.schema import value_at
from verl.foreign_text import clean
from verl.page.notes import Notes
from verl.page.plan import plan_context
from verl.regular_files import open_regular
from verl.tracking import files
from verl.tracking.bottleneck import Bottleneck, find_bottleneck
from verl.tracking.heartbeat import EVENTS, Beat, read_beat
from verl.tracking.lock import holder_of
from verl.tracking.pictures import TOKEN, TOKENS
from verl.tracking.progress import EVENT
from verl.tracking.run_folder import RunFolder
from verl.tracking.timeline import PLANNED, SHARE
from verl.tracking.timeline import ROW as TIMELINE_ROW

_NEAR_BYTES = 1 << 16  # so much is read in order once the bisection is that near


class Follower:
    """The rows of a file of `append_rows`, read as they are appended. A line without its end is read when it has one.

    `num_damaged` counts the lines that are no rows. `is_replaced`: the last `read` found the file replaced or cut, as
    on resume, and has read its rows from the start. `is_partial`: some rows were left out, see `read`.
    """

    def __init__(self, path: Path, check: files.Check):
        self.path = path
        self.is_replaced = self.is_partial = False
        self.num_damaged = 0
        self._check = check
        self._offset = 0
        self._identity: tuple[int, int] | None = None

    def read(self, limit: int = sys.maxsize) -> list[files.Row]:
        """The rows since the last call; if these have more than `limit` bytes, rows at evenly spaced places. None when the
        file is missing or cannot be read."""
        rows: list[dict[str, object]] = []
        self.is_replaced = False
        with contextlib.suppress(OSError), os.fdopen(open_regular(self.path), "rb") as file:
            status = os.fstat(file.fileno())
            identity = (status.st_dev, status.st_ino)
            if identity != self._identity or status.st_size < self._offset:
                self.is_replaced = self._identity is not None
                self._identity, self._offset, self.num_damaged, self.is_partial = identity, 0, 0, False
            segments = files.even_segments(self._offset, status.st_size, limit)
            self.is_partial |= len(segments) > 1
            for line, end in files.lines_of(file, segments):
                if not line.endswith(b"\n"):
                    break
                self._offset = end
                row = files.parse_line(line, self._check)
                if row is None:
                    self.num_damaged += 1
                else:
                    rows.append(row)
        return rows


def rows_of_step(path: Path, step: int, check: files.Check) -> list[files.Row]:
    """The rows of `step` in a file of rows with growing steps; none when it is missing. The place is bisected, so a file of
    any length costs a few reads."""
    rows: list[dict[str, object]] = []
    with contextlib.suppress(OSError), os.fdopen(open_regular(path), "rb") as file:

        def read_from(start: int) -> Iterator[files.Row]:
            parsed = (files.parse_line(line, check) for line, _ in files.lines_of(file, [(start, sys.maxsize)]))
            return (row for row in parsed if row is not None)

        low, high = 0, os.fstat(file.fileno()).st_size
        while high - low > _NEAR_BYTES:  # the rows of `step` begin behind `low`
            middle = (low + high) // 2
            row = next(read_from(middle), None)
            low, high = (middle, high) if row is not None and row["step"] < step else (low, middle)
        upwards = itertools.takewhile(lambda row: row["step"] <= step, read_from(low))
        rows = [row for row in upwards if row["step"] == step]
    return rows


_SPAN = files.has(name=files.is_text, start=files.is_number, seconds=files.is_number, step=files.is_count)
_RESUME_GAP_S = 0.5  # the timeline has no gaps within one process
# section that only one kind of run has -> that kind; the first one counts
KINDS = {"algorithm": "rl", "sft": "sft", "rm": "rm", "preference": "preference"}
_LOSS_NAMES = {"sigmoid": "dpo"}  # preference.loss -> the usual name of such a run, if it is another


class Series:
    """One metric: int64 steps and float64 values, in the order of writing."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.values = array("d")

    @property
    def last(self) -> float:
        return self.values[-1]


class RunReader:
    """One run folder. `refresh` reads new records; `version` changes when there were any. Thread-safe."""

    def __init__(self, folder: Path, key: str):
        self.folder = folder
        self.notes = Notes(folder)
        self.key = key
        self.version = 0
        self._lock = threading.RLock()
        self._checked = 0.0
        self._config: tuple[float, files.Json] = (-1.0, {})
        self.index_problem = ""
        self.max_bytes = sys.maxsize  # read from a file at once; of a larger one the page has evenly spaced rows
        self._start()

    def _start(self) -> None:
        self._metrics_file = Follower(self.folder / "metrics.jsonl", files.is_metrics_row)
        self._timeline_file = Follower(self.folder / "timeline.jsonl", TIMELINE_ROW)
        self._planned_file = Follower(self.folder / PLANNED, TIMELINE_ROW)
        self._events_file = Follower(self.folder / EVENTS, EVENT)
        self._tokens_file = Follower(self.folder / TOKENS, TOKEN)
        self.metrics: dict[str, Series] = {}
        self._series: dict[str, Series] = {}  # by the name in the file; it is cleaned once
        self.timeline: list[files.Row] = []
        self.planned: list[files.Row] = []  # steps as `verl plan` has simulated them
        self.events: list[files.Row] = []
        self.tokens: dict[int, tuple[str, bool]] = {}  # id -> its text, and whether it is a special token
        self.times: dict[int, float] = {}  # step -> seconds since 1970 when its row was written

    def refresh(self, at_most_every_s: float = 0.2) -> int:
        """Read the records that the run has written since the last call; returns the version."""
        with self._lock:
            now = time.monotonic()
            if now - self._checked < at_most_every_s:
                return self.version
            self._checked = now
            self.version += any([self._read_metrics(), self._read_timeline(), self._read_rest()])
            return self.version

    def _read_metrics(self) -> bool:
        rows = self._metrics_file.read(self.max_bytes)
        if self._metrics_file.is_replaced:
            self.metrics, self._series, self.times = {}, {}, {}
        for row in rows:
            step, written = row.pop("step"), row.pop("time", None)
            if files.is_number(written):
                self.times[step] = written
            for name, value in row.items():
                if value is None or not -files.LARGEST <= value <= files.LARGEST:
                    continue
                series = self._series.get(name)
                if series is None:
                    series = self._series[name] = self.metrics.setdefault(clean(name), Series())
                series.steps.append(step)
                series.values.append(value)
        return bool(rows)

    def _read_timeline(self) -> bool:
        rows = self._timeline_file.read(self.max_bytes // SHARE)
        self.timeline = rows if self._timeline_file.is_replaced else self.timeline + rows
        planned = self._planned_file.read(self.max_bytes)
        self.planned = planned if self._planned_file.is_replaced else self.planned + planned
        return bool(rows)

    def _read_rest(self) -> bool:
        rows = self._events_file.read(self.max_bytes)
        self.events = rows if self._events_file.is_replaced else self.events + rows
        tokens = self._tokens_file.read(self.max_bytes)
        if self._tokens_file.is_replaced:
            self.tokens = {}
        self.tokens.update((row["id"], (row["text"], row.get("special") is True)) for row in tokens)
        return bool(rows)

    # -- what follows from the records ---------------------------------------------------------------------------------

    @property
    def problems(self) -> list[str]:
        """A sentence for each file that is missing or damaged."""
        if self.status == "removed":
            return [f"The folder {clean(self.folder)} was removed. These are the values that were read before."]
        if not self.folder.is_dir():
            return [f"There is no folder {clean(self.folder)} yet. It appears here when the run starts."]
        sentences = [self.index_problem] if self.index_problem else []
        if self._metrics_file.is_partial:
            sentences.append(
                "metrics.jsonl is long: the curves and the tables have evenly spaced steps, not every step."
            )
        if not self.metrics and not self.is_running:
            sentences.append("No step has been written to metrics.jsonl.")
        for file in (
            self._metrics_file, self._timeline_file, self._planned_file, self._events_file, self._tokens_file
        ):  # fmt: skip
            if file.num_damaged:
                lines = "1 line" if file.num_damaged == 1 else f"{file.num_damaged:,} lines"
                sentences.append(f"{file.path.name} is damaged: {lines} cannot be read and are left out.")
        return sentences

    @property
    def config(self) -> files.Json:
        """The run's config as plain mappings; empty without a readable file."""
        try:
            changed = (self.folder / "config.yaml").stat().st_mtime
        except OSError:
            return {}
        if changed != self._config[0]:
            self._config = (changed, RunFolder(self.folder).read_config())
        return self._config[1]

    def config_value(self, path: str, default: object = None) -> Any:
        value = value_at(self.config, path)
        return default if value is None else value

    @property
    def kind(self) -> str:
        """rl, sft, preference or rm."""
        return next((kind for section, kind in KINDS.items() if section in self.config), "rl")

    @property
    def curves(self) -> dict[str, dict[str, str]]:
        return RunFolder(self.folder).read_curves()

    @property
    def step(self) -> int:
        """The newest step that was written."""
        return max(self.times, default=0)

    @property
    def total_steps(self) -> int | None:
        return next((row["of"] for row in reversed(self.timeline) if row.get("of")), None)

    def spans_of(self, step: int) -> list[dict[str, object]]:
        """The spans of a step, read from its place in the file."""
        return rows_of_step(self.folder / "spans.jsonl", step, _SPAN)

    def timeline_row(self, step: int) -> dict[str, object] | None:
        """The row of a step, read from its place in the file."""
        return next(reversed(rows_of_step(self.folder / "timeline.jsonl", step, TIMELINE_ROW)), None)

    def metrics_of(self, step: int) -> dict[str, float]:
        """The metrics of a step, read from their place in the file; empty for a step without a row."""
        rows = rows_of_step(self.folder / "metrics.jsonl", step, files.is_metrics_row)
        return {clean(name): value for row in rows for name, value in row.items() if files.is_number(value)}

    def planned_row(self, step: int) -> dict[str, object] | None:
        """The simulated step of that number; the last one for a step beyond them, and None without a plan."""
        return next((row for row in self.planned if row["step"] == step), self.planned[-1] if self.planned else None)

    @property
    def has_plan(self) -> bool:
        return plan_context(self.folder) is not None

    @property
    def is_running(self) -> bool:
        return holder_of(self.folder) is not None

    @property
    def is_live(self) -> bool:
        """Whether the run continues: its process is there, and its heartbeat younger than trainer.hang_timeout_s, unless that
        is 0."""
        beat, limit_s = self.beat, self.config_value("trainer.hang_timeout_s", 0)
        if not self.is_running or beat is None:
            return False
        return not files.is_number(limit_s) or not limit_s or time.time() - beat.since < limit_s

    @property
    def program(self) -> str:
        """The kind of the run in a word: its estimator, its preference loss, or sft or rm."""
        chosen = {"rl": "algorithm.adv_estimator", "preference": "preference.loss"}.get(self.kind, "")
        value = self.config_value(chosen, self.kind) if chosen else self.kind
        names = value if isinstance(value, list) else [value]
        return clean(", ".join(_LOSS_NAMES.get(str(name), str(name)) for name in names))

    @property
    def model(self) -> str:
        """The last part of the model's name, of a checkpoint its run and step; "" without a readable config."""
        path = self.config_value("actor_rollout_ref.model.path") or self.config_value("model.path", "")
        parts = str(path).rstrip("/").split("/")
        return clean("/".join(parts[-4:-2]) if parts[-1] == "huggingface" and len(parts) > 3 else parts[-1])

    @property
    def began(self) -> float | None:
        """Start of the first step, in seconds since 1970."""
        return self.timeline[0].get("start") if self.timeline else min(self.times.values(), default=None)

    @property
    def duration_s(self) -> float | None:
        """Seconds from the first step to the newest row."""
        return None if self.began is None else max(self.times.values(), default=self.began) - self.began

    @property
    def main_metric(self) -> Series | None:
        """The reward of reinforcement learning, else the training loss."""
        return self.metrics.get("critic/score/mean") or self.metrics.get("train/loss")

    @property
    def status(self) -> str:
        """running, finished, stopped, or removed: there is no folder any more."""
        if self.is_running:
            return "running"
        if self.metrics and not self.folder.is_dir():
            return "removed"
        return "finished" if (self.folder / "summary.json").is_file() else "stopped"

    @property
    def beat(self) -> Beat | None:
        return read_beat(self.folder)

    @property
    def step_s(self) -> float | None:
        """Median seconds of the last 20 steps."""
        seconds = sorted(row["seconds"] for row in self.timeline[-20:])
        return seconds[len(seconds) // 2] if seconds else None

    @property
    def seconds_left(self) -> float | None:
        if self.step_s is None or not self.total_steps or not self.is_running:
            return None
        return self.step_s * (self.total_steps - self.step)

    def bottleneck(self) -> Bottleneck | None:
        recent = self.timeline[-200:]
        first = recent[0]["step"] if recent else 0
        return find_bottleneck(recent, self.metric_rows(first), self.config)

    def metric_rows(self, first_step: int = 0) -> list[dict[str, float]]:
        """The rows of metrics from `first_step` on, rebuilt from the series."""
        rows: dict[int, dict[str, float]] = {}
        for name, series in self.metrics.items():
            for step, value in zip(reversed(series.steps), reversed(series.values), strict=True):
                if step < first_step:
                    break
                rows.setdefault(step, {"step": step})[name] = value
        return [rows[step] for step in sorted(rows)]

    def marks(self) -> list[files.Row]:
        """Crashes and resumptions: {step, kind, text}."""
        marks = []
        for event in self.events:
            place = clean(event.get("phase") or "an unknown phase")
            text = f"crash in {place}: {clean(event.get('cause') or '')}"
            if files.is_count(event.get("step")):
                marks.append({"step": event["step"], "kind": "crash", "text": text})
        for before, row in zip(self.timeline, self.timeline[1:], strict=False):
            gap = row.get("start", 0) - before.get("start", 0) - before["seconds"]
            if gap > _RESUME_GAP_S and row["step"] == before["step"] + 1:
                marks.append({"step": row["step"], "kind": "resume", "text": f"resumed before step {row['step']}"})
        return marks
