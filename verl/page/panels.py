"""Charts of a run: which metrics share a panel, and their points for the browser."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from verl.page.index import SampleIndex
from verl.page.reader import RunReader, Series

MAX_POINTS = 1200  # of a curve; above, each bucket of steps shows its smallest and its largest value


@dataclass(frozen=True)
class ChartLine:
    label: str
    steps: Sequence[int]
    values: Sequence[float]
    style: str = "line"  # line, dots, band (the values between two of them), stack
    run: int | None = None  # on a page of several runs, which one: it decides the colour


@dataclass(frozen=True)
class Panel:
    title: str
    lines: list[ChartLine]
    unit: str = ""
    help: str = ""
    group: str = ""  # charts of a group stand under its name


@dataclass(frozen=True)
class _Spec:
    title: str
    metrics: Mapping[str, str]  # metric -> label
    unit: str = ""
    help: str = ""
    band: tuple[str, str] | None = None


_FAILURES = "Scorers that failed"
_SPECS = (
    _Spec(
        "Response length", {"response_length/mean": "mean"}, "tokens", "mean, shortest and longest of a step",
        ("response_length/min", "response_length/max"),
    ),
    _Spec("Entropy", {"actor/entropy": "policy", "train/entropy": "training", "val/entropy": "held-out"}, "nats"),
    _Spec(
        "KL",
        {"actor/ppo_kl": "to the old policy", "actor/kl_loss": "to the reference",
         "actor/reward_kl_penalty": "penalty in the reward"},
        "nats",
    ),
    _Spec(
        "Clipped",
        {"actor/pg_clipfrac": "tokens, upper clip", "actor/pg_clipfrac_lower": "tokens, lower clip",
         "response_length/clip_ratio": "responses cut at the length limit"},
        "share", "tokens whose ratio was clipped, and responses that reached data.max_response_length",
    ),
    _Spec(
        "Sampler against trainer",
        {"training/rollout_probs_diff_max": "largest", "training/rollout_probs_diff_mean": "mean"},
        "probability", "difference between the sampler's and the trainer's probability of a sampled token",
    ),
    _Spec("Gradient norm", {"actor/grad_norm": "actor", "critic/grad_norm": "critic", "train/grad_norm": ""}, "",
          "before clipping"),
    _Spec("Learning rate", {"actor/lr": "actor", "critic/lr": "critic", "train/lr": ""}),
    _Spec("Critic", {"critic/vf_explained_var": "explained variance", "critic/vf_loss": "loss"}),
    _Spec(
        "Updates that survive rounding",
        {"actor/visible_update_ratio": "actor", "critic/visible_update_ratio": "critic",
         "model/visible_update_ratio": "model"},
        "share", "share of the masters' movement that the weights which compute show",
    ),
    _Spec("Throughput", {"perf/throughput": ""}, "tokens/s per device"),
    _Spec(
        "Memory",
        {"perf/max_memory_allocated_gb": "device, allocated", "perf/max_memory_reserved_gb": "device, reserved",
         "perf/cpu_memory_used_gb": "processor"},
        "GB",
    ),
    _Spec("Age of the samples", {"training/off_policy/trajectory_staleness/mean": "mean",
                                 "training/off_policy/trajectory_staleness/max": "largest"}, "weight versions"),
    _Spec(_FAILURES, {"reward/num_defaulted": "samples whose scorer failed"}, "samples"),
)  # fmt: skip


def panels(run: RunReader, index: SampleIndex) -> list[Panel]:
    """The panels of a run that have data, the most important first."""
    declared = [_Spec(title[:1].upper() + title[1:], names) for title, names in run.curves.items()]
    files = index.statistics().get("train", [])
    reward = [_reward(run, files)] if run.kind == "rl" else []
    specs = [spec for spec in declared if not (reward and "critic/score/mean" in spec.metrics)]
    ours = {name for spec in _SPECS for name in spec.metrics}
    # our panel shows more than a panel that the program declares for the same metrics
    specs = [spec for spec in specs if not set(spec.metrics) <= ours]
    shown = reward + [_panel(run, spec) for spec in (*specs, *_SPECS)] + [_signal(files), _plan(run), _phases(run)]
    return [panel for panel in shown if panel.lines and not _says_nothing(panel)]


def _says_nothing(panel: Panel) -> bool:
    """A panel of failures without one."""
    return panel.title == _FAILURES and not any(any(line.values) for line in panel.lines)


def _panel(run: RunReader, spec: _Spec) -> Panel:
    known = {name: run.metrics[name] for name in spec.metrics if name in run.metrics}
    lines = [
        ChartLine(spec.metrics[name], series.steps, series.values, "dots" if _is_sparse(run, series) else "line")
        for name, series in known.items()
    ]
    if spec.band is not None and known and all(name in run.metrics for name in spec.band):
        for name in spec.band:
            lines.append(
                ChartLine(name.rpartition("/")[2], run.metrics[name].steps, run.metrics[name].values, style="band")
            )
    return Panel(spec.title, lines, spec.unit, spec.help)


def _is_sparse(run: RunReader, series: Series) -> bool:
    return len(series.steps) < 0.5 * len(run.times)


def _reward(run: RunReader, files: Sequence[sqlite3.Row]) -> Panel:
    known = {"critic/score/mean": "training", "val/reward": "held-out", "val/greedy": "held-out, greedy"}
    labels = {name: label for panel in run.curves.values() for name, label in panel.items()}
    names = {name: labels[name] for name in known if name in labels} or known
    base = _panel(run, _Spec("Reward", names))
    rows = [row for row in files if row["low"] is not None]
    steps = [row["step"] for row in rows]
    band = [ChartLine(label, steps, [row[label] for row in rows], "band") for label in ("low", "high")] if rows else []
    return Panel(
        "Reward", base.lines + band, "", "band: 10th to 90th percentile of the groups' mean rewards; dots: held-out"
    )


def _signal(files: Sequence[sqlite3.Row]) -> Panel:
    rows = [row for row in files if row["without_signal"] is not None]
    steps = [row["step"] for row in rows]
    lines = [
        ChartLine("groups of equal rewards (share)", steps, [row["without_signal"] for row in rows]),
        ChartLine("mean spread within a group", steps, [row["group_spread"] for row in rows]),
    ]
    return Panel("Learning signal", lines if rows else [], "", "a group whose rewards are equal trains nothing")


def _phases(run: RunReader) -> Panel:
    names = list(dict.fromkeys(name for row in run.timeline for name in row["phases"]))
    steps = [row["step"] for row in run.timeline]
    lines = [ChartLine(n, steps, [row["phases"].get(n, 0.0) for row in run.timeline], "stack") for n in names]
    return Panel("Seconds of a step by phase", lines, "s", "they add up to the time of the step")


def _plan(run: RunReader) -> Panel:
    """Seconds of a step, simulated and measured; nothing without a plan."""
    sides = {"measured": run.timeline, "planned": [row for row in run.planned if row["step"] <= max(run.step, 1)]}
    lines = [
        ChartLine(name, [r["step"] for r in rows], [r["seconds"] for r in rows]) for name, rows in sides.items() if rows
    ]
    return Panel("Step time against the plan", lines if run.planned else [], "s", "planned: simulated by verl plan")


def all_metrics(run: RunReader) -> list[Panel]:
    """A panel for each metric, by name."""
    return [
        Panel(name, [ChartLine("", s.steps, s.values)], group=name.partition("/")[0] if "/" in name else "other")
        for name, s in sorted(run.metrics.items())
    ]


def charts_json(charts: Iterable[Panel], marks: Sequence[Mapping[str, object]] = ()) -> dict[str, object]:
    """The panels for the browser: one axis of steps and aligned columns each, with null where a line has no point."""
    return {"panels": [_aligned(panel) for panel in charts], "marks": list(marks)}


def _aligned(panel: Panel) -> dict[str, object]:
    thinned = [thin(line.steps, line.values) for line in panel.lines]
    x = sorted({step for points in thinned for step in points})
    series = [
        {
            "label": line.label,
            "style": line.style,
            "run": line.run,
            "values": [_rounded(points.get(step)) for step in x],
        }
        for line, points in zip(panel.lines, thinned, strict=True)
    ]
    shown = {"title": panel.title, "unit": panel.unit, "help": panel.help, "group": panel.group}
    return {**shown, "x": x, "series": series}


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def thin(steps: Sequence[int], values: Sequence[float]) -> dict[int, float]:
    """step -> value; of more than MAX_POINTS points each bucket keeps its smallest and its largest value, so that no peak
    is lost."""
    points = dict(zip(steps, values, strict=True))
    if len(points) <= MAX_POINTS:
        return points
    items = sorted(points.items())
    size = -(-2 * len(items) // MAX_POINTS)
    thinned: dict[int, float] = {}
    for start in range(0, len(items), size):
        bucket = items[start : start + size]
        thinned.update([min(bucket, key=lambda item: item[1]), max(bucket, key=lambda item: item[1])])
    return dict(sorted([*thinned.items(), items[-1]]))
