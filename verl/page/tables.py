"""Context of the pages of a run: header, time by phase, config, log; and formats of numbers."""

import re
import sqlite3
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from verl.page.index import SampleIndex
from verl.page.reader import RunReader
from verl.tracking.files import Row
from verl.tracking.ledger.reader import read_counts
from verl.tracking.progress import read_tail
from verl.tracking.run_folder import RunFolder

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_NUM_RECORDS = 500
_STEPS = "steps"  # the source of their lines in the log
_READ_BYTES = 2 << 20  # of the end of each rank's log
_RECORD = re.compile(rf"(\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d,\d+) ({'|'.join(_LEVELS)}) \d+ (.*)")


class LogLine(NamedTuple):
    time: str
    rank: str  # the name of its file
    level: str
    text: str  # with its further lines


def read_log(file: Path) -> list[LogLine]:
    """The records at the end of a log, oldest first."""
    records: list[tuple[str, str, list[str]]] = []  # time, level, lines
    for line in read_tail(file, _READ_BYTES).splitlines():
        if match := _RECORD.fullmatch(line):
            records.append((match[1], match[2], [match[3]]))
        elif records:
            records[-1][-1].append(line)
    return [LogLine(time, file.stem, level, "\n".join(lines)) for time, level, lines in records]


def log_context(run: RunReader, query: Mapping[str, str]) -> dict[str, object]:
    """Events of the supervisor, newest first, and the newest records that match `rank`, `level` (this one and graver ones)
    and `q`, a text in any case. The lines of steps have the rank "steps"."""
    files = {file.stem: file for file in sorted((run.folder / "logs").glob("*.log"))}
    rank, text = query.get("rank", ""), query.get("q", "").casefold()
    level = query["level"] if query.get("level") in _LEVELS else _LEVELS[0]
    graver = _LEVELS[_LEVELS.index(level) :]
    every = [record for name, file in files.items() if rank in ("", name) for record in read_log(file)]
    every += _step_lines(run) if rank in ("", _STEPS) else []
    records = sorted(r for r in every if r.level in graver and text in r.text.casefold())
    return {
        "events": list(reversed(run.events)), "ranks": [*files, _STEPS], "levels": _LEVELS, "rank": rank, "level": level,
        "text": query.get("q", ""), "records": records[-_NUM_RECORDS:], "num_records": len(records),
    }  # fmt: skip


def _step_lines(run: RunReader) -> list[LogLine]:
    """A record for each of the newest steps: its headline metrics."""
    of = f" of {run.total_steps}" if run.total_steps else ""
    lines = []
    for row in run.metric_rows(max(run.step - _NUM_RECORDS, 0) + 1):
        step = int(row["step"])
        if (written := run.times.get(step)) is not None:
            figures = [f"{_SHORT[name]} {number(row[name], 3)}" for name in _HEADLINES[run.kind] if name in row]
            time_ms = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written)) + f",{int(written % 1 * 1000):03d}"
            lines.append(LogLine(time_ms, _STEPS, "INFO", " · ".join([f"step {step}{of}", *figures])))
    return lines


def number(value: float | None, digits: int = 4) -> str:
    """A number with `digits` significant digits, or all before the point; "–" for none."""
    if value is None:
        return "–"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer() and abs(value) < 1e6):
        return f"{int(value):,}"
    if 10**digits <= abs(value) < 1e6:
        return f"{value:,.0f}".replace("-", "−")
    return f"{value:.{digits}g}".replace("-", "−")


def clock(seconds: float | None) -> str:
    return "" if seconds is None else time.strftime("%H:%M:%S", time.localtime(seconds))


def run_context(run: RunReader, index: SampleIndex) -> Row:
    """Context of the run page, without its charts."""
    bottleneck = run.bottleneck()
    rows = index.statistics()
    splits = {split: [row["step"] for row in files] for split, files in rows.items()}
    listing = index.listing()
    return {
        "bottleneck": bottleneck,
        "counts": read_counts(run.folder),
        "headline": _headline(run),
        "columns": list(_COLUMNS[run.kind]),
        "splits": splits,
        "num_unread": index.num_unread(listing),
        "recent": _recent(run, rows.get("train", [])),
        "files": {split: newest for split, (_, newest) in listing.items()},
    }


_HEADLINES = {
    "rl": ("critic/score/mean", "val/reward", "val/greedy", "response_length/mean", "response_length/clip_ratio",
           "response/distinct_ratio", "training/rollout_probs_diff_max", "perf/throughput"),
    "sft": ("train/loss", "val/loss", "train/token_accuracy", "val/token_accuracy", "perf/throughput"),
    "preference": ("train/loss", "train/rewards/accuracies", "train/rewards/margins", "val/rewards/accuracies",
                   "perf/throughput"),
    "rm": ("train/loss", "train/accuracy", "val/accuracy", "val/calibration_error", "perf/throughput"),
}  # fmt: skip
# kind -> the columns of its steps: title -> a metric, or a column of the index of samples
_COLUMNS = {
    "rl": {"reward": "mean", "spread in a group": "group_spread", "groups without signal": "without_signal",
           "samples": "rows"},
    "sft": {"loss": "train/loss", "accuracy": "train/token_accuracy", "samples": "rows"},
    "preference": {"loss": "train/loss", "ranked as labelled": "train/rewards/accuracies",
                   "margin": "train/rewards/margins", "samples": "rows"},
    "rm": {"loss": "train/loss", "accuracy": "train/accuracy"},
}  # fmt: skip
_SHORT = {
    "critic/score/mean": "reward", "val/reward": "held-out", "val/greedy": "held-out, greedy",
    "response_length/mean": "length", "response_length/clip_ratio": "responses cut",
    "response/distinct_ratio": "different responses",
    "training/rollout_probs_diff_max": "sampler vs trainer", "perf/throughput": "tokens/s", "train/loss": "loss",
    "val/loss": "held-out loss", "train/token_accuracy": "accuracy", "val/token_accuracy": "held-out accuracy",
    "train/rewards/accuracies": "ranked as labelled", "train/rewards/margins": "margin",
    "val/rewards/accuracies": "held-out, as labelled", "train/accuracy": "accuracy", "val/accuracy": "held-out accuracy",
    "val/calibration_error": "calibration error",
}  # fmt: skip


def _headline(run: RunReader) -> list[dict[str, object]]:
    """The newest values of the few metrics that matter most, with the first ones."""
    rows = []
    for name in _HEADLINES[run.kind]:
        series = run.metrics.get(name)
        if series is not None:
            first = series.values[0] if len(series.values) > 1 else None
            rows.append({"label": _SHORT[name], "name": name, "value": series.last, "first": first})
    return rows


def _recent(run: RunReader, files: Sequence[sqlite3.Row]) -> list[dict[str, object]]:
    """The newest steps, with their rows in the index."""
    by_step = {row["step"]: row for row in files}
    columns = _COLUMNS[run.kind]
    values = {name: dict(zip(run.metrics[name].steps, run.metrics[name].values, strict=True))
              for name in columns.values() if name in run.metrics}  # fmt: skip
    steps: list[dict[str, object]] = []
    for step in sorted(set(run.times) - {0}, reverse=True)[:6]:
        row = by_step.get(step)
        columns_of_row = dict(row) if row else {}
        cells = [values[n].get(step) if n in values else columns_of_row.get(n) for n in columns.values()]
        steps.append({"step": step, "file": row, "time": run.times.get(step), "cells": cells})
    return steps


def polyline(values: Sequence[float]) -> str:
    """The points of a sparkline, 100 wide and 20 high: the last value of each of at most 60 parts of the curve."""
    num = min(len(values), 60)
    ends = [values[(i + 1) * len(values) // num - 1] for i in range(num)]
    low, high = min(ends, default=0.0), max(ends, default=0.0)
    room = (high - low) or 1.0
    return " ".join(
        f"{100 * i / max(len(ends) - 1, 1):.1f},{19 - 18 * (v - low) / room:.1f}" for i, v in enumerate(ends)
    )


HIDDEN_KEYS = ("trainer.default_local_dir", "trainer.experiment_name")  # no two runs share them
_GROUPINGS: Mapping[str, Callable[[RunReader], str]] = {
    "kind": lambda run: run.program, "model": lambda run: run.model,
    "tags": lambda run: " ".join(f"#{tag}" for tag in run.notes.tags),
}  # fmt: skip


def final_context(runs: Sequence[RunReader], by: str) -> dict[str, object]:
    """The newest headline metrics of `runs` as columns, with a row for each run; or for each value of `by` (kind, model, tags,
    or a given key with different values), with mean and standard deviation over its runs."""
    keys = {run.key: {row.key: row for row in RunFolder(run.folder).read_keys()} for run in runs}
    keys_set = sorted({row.key for rows in keys.values() for row in rows.values() if row.origin} - {*HIDDEN_KEYS})

    def value(run: RunReader, name: str) -> str:
        row = keys[run.key].get(name)
        return _GROUPINGS[name](run) if name in _GROUPINGS else row.value if row else "–"

    choices = [name for name in (*_GROUPINGS, *keys_set) if len({value(run, name) for run in runs}) > 1]
    by = by if by in choices else ""
    groups: dict[str, list[RunReader]] = {}
    for run in runs:
        groups.setdefault(value(run, by) if by else run.key, []).append(run)
    columns = list(dict.fromkeys(name for run in runs for name in _HEADLINES[run.kind] if name in run.metrics))
    rows = [
        {"name": name, "runs": [run.key for run in members],
         "settings": [(key, value(members[0], key)) for key in choices if key in keys_set and not by],
         "cells": [[run.metrics[column].last for run in members if column in run.metrics] for column in columns]}
        for name, members in groups.items()
    ]  # fmt: skip
    return {"by": by, "groupings": choices, "finals": rows, "final_columns": {name: _SHORT[name] for name in columns}}


def mean_and_spread(values: Sequence[float]) -> str:
    """The mean of the runs, and with several their standard deviation."""
    spread = f" ± {number(statistics.stdev(values), 2)}" if len(values) > 1 else ""
    return number(statistics.fmean(values), 3) + spread if values else "–"
