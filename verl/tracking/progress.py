"""Progress of a run, read from its folder during the run or afterwards: status, learning curves, last warnings."""

import json
import os
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from verl.foreign_text import clean
from verl.regular_files import open_regular
from verl.tracking.bottleneck import Bottleneck, beside_plan, find_bottleneck
from verl.tracking.files import (
    SHOWN_BYTES,
    Json,
    has,
    is_count,
    is_number,
    is_text,
    maybe,
    read_json_rows,
    read_metrics,
)
from verl.tracking.heartbeat import EVENTS, read_beat
from verl.tracking.ledger.reader import Counts, read_counts
from verl.tracking.lock import holder_of
from verl.tracking.run_folder import Curves, RunFolder, require_run_folder
from verl.tracking.timeline import PLANNED, read_timeline

_LOG_BYTES = 1 << 16  # looked at from the end of a log
_LINE_CHARS = 1000
_NUM_COMPLAINTS = 5
EVENT = has(
    time=lambda value: is_number(value) and 0 <= value < 1e11, event=is_text, cause=is_text, step=maybe(is_count),
    phase=maybe(is_text), **{"from": maybe(is_text)},
)  # fmt: skip
# metrics with a best value: the lowest or the highest
_BETTER = re.compile(r"(?!.*(kl|penalty)).*(score|reward|greedy|accurac|margin|loss)")
# metrics about an exception, not displayed while they are 0: KL is with one update a step
_EXCEPTION = re.compile(r"ppo_kl|kl_loss|kl_penalty|num_defaulted|staleness")
_NOTHING = 1e-7
_RECORD = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ (WARNING|ERROR|CRITICAL) ")


@dataclass(frozen=True)
class Curve:
    """One metric over the steps; of a very long run, over evenly spread ones. First and last are means over a tenth of the
    points each (at least one). The best value is the lowest of a loss, and the highest of rewards, accuracies and margins;
    a length, for example, has none."""

    meaning: str
    first: float
    last: float
    best: float | None
    best_step: int | None
    points: list[float]


@dataclass(frozen=True)
class Progress:
    folder: Path
    status: str  # running, stopped (can be resumed), finished
    process: str  # the process that holds the folder; "" for none
    step: int
    total_steps: int | None
    step_s: float | None  # median
    seconds_left: float | None
    last_written_s: float | None  # seconds since the newest row
    bottleneck: Bottleneck | None
    curves: dict[str, Curve]
    complaints: list[str] = field(default_factory=list)  # the last warnings and errors of the logs
    doing: str = ""  # current phase, from the heartbeat
    doing_s: float | None = None  # seconds in that phase
    crashes: list[dict[str, object]] = field(default_factory=list)  # recorded by the supervisor, oldest first
    samples: Counts | None = None  # None without a readable ledger
    planned: str | None = None  # the measured step next to the step of `verl plan`, if there is a plan


def read_progress(folder: Path) -> Progress:
    """Read the progress of the run in `folder`. Raises ConfigError when it is not a run folder."""
    require_run_folder(folder)
    timeline = list(read_timeline(folder / "timeline.jsonl", SHOWN_BYTES))
    metrics = list(read_metrics(folder / "metrics.jsonl", SHOWN_BYTES))
    total = next((row["of"] for row in reversed(timeline) if row.get("of")), None)
    step = max((int(row["step"]) for row in metrics), default=0)
    process = holder_of(folder)
    # a run that began again has set the records of the earlier one aside, at this second
    began_again = max((aside.name.split("_")[1].replace("-", "") for aside in folder.glob("superseded_*")), default="")
    finished = (folder / "summary.json").is_file() and process is None
    events = read_json_rows(folder / EVENTS, EVENT)
    seconds = statistics.median(row["seconds"] for row in timeline[-20:]) if timeline else None
    beat = read_beat(folder) if process is not None else None
    return Progress(
        folder=folder,
        status="running" if process is not None else "finished" if finished else "stopped",
        process=process or "",
        step=step,
        total_steps=total,
        step_s=seconds,
        seconds_left=seconds * (total - step) if seconds is not None and total and process is not None else None,
        last_written_s=time.time() - metrics[-1]["time"] if metrics and "time" in metrics[-1] else None,
        bottleneck=find_bottleneck(timeline, metrics, RunFolder(folder).read_config()),
        curves=_curves(metrics, RunFolder(folder).read_curves()),
        complaints=last_complaints(folder / "logs", _NUM_COMPLAINTS, since=began_again),
        doing=beat.phase if beat else "",
        doing_s=time.time() - beat.since if beat else None,
        crashes=[{name: clean(v) if isinstance(v, str) else v for name, v in row.items()} for row in events],
        samples=read_counts(folder),
        planned=beside_plan(timeline, list(read_timeline(folder / PLANNED))),
    )


def _curves(metrics: Sequence[Json], panels: Curves) -> dict[str, Curve]:
    curves = {}
    named = {name: f"{title}, {label}" if label else title for title, p in panels.items() for name, label in p.items()}
    for name, meaning in named.items():
        points = [(int(row["step"]), float(row[name])) for row in metrics if name in row]
        if points and not says_nothing(name, [value for _, value in points]):
            values = [value for _, value in points]
            some = max(len(values) // 10, 1)
            best_step, best = _best(name, points)
            curves[name] = Curve(
                meaning, statistics.mean(values[:some]), statistics.mean(values[-some:]), best, best_step, values
            )
    return curves


def says_nothing(name: str, values: Sequence[float]) -> bool:
    """Whether a metric about an exception has been 0 throughout."""
    return _EXCEPTION.search(name) is not None and all(abs(value) <= _NOTHING for value in values)


def _best(name: str, points: Sequence[tuple[int, float]]) -> tuple[int, float] | tuple[None, None]:
    if not _BETTER.match(name):
        return None, None
    return (min if "loss" in name else max)(points, key=lambda point: point[1])


def last_complaints(logs: Path, count: int, since: str = "") -> list[str]:
    """The last `count` warnings and errors of the logs in a folder, from the second `since` on (14 digits)."""
    lines = (line for file in logs.glob("*.log") for line in read_tail(file).splitlines())
    complaints = sorted(
        clean(line, limit=_LINE_CHARS)
        for line in lines
        if _RECORD.match(line) and re.sub(r"\D", "", line[:19]) >= since
    )
    return complaints[-count:] if count else []


def read_tail(file: Path, num_bytes: int = _LOG_BYTES) -> str:
    """The last `num_bytes` of a log; "" when it cannot be read."""
    try:
        with os.fdopen(open_regular(file), "rb") as stream:
            stream.seek(max(os.fstat(stream.fileno()).st_size - num_bytes, 0))
            return stream.read(num_bytes).decode("utf-8", errors="replace")
    except OSError:
        return ""


def to_json(progress: Progress) -> str:
    """All fields but the points of the curves, as JSON for scripts."""
    plain = dict(vars(progress))
    plain["folder"] = str(progress.folder)
    plain["samples"] = vars(progress.samples) if progress.samples else None
    plain["bottleneck"] = vars(progress.bottleneck) if progress.bottleneck else None
    plain["curves"] = {n: {k: v for k, v in vars(c).items() if k != "points"} for n, c in progress.curves.items()}
    return json.dumps(plain, indent=2)
