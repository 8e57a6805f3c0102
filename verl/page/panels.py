"""Charts: the metrics of each panel, their points for the browser, and the curves of several runs over each other."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl.page.index import SampleIndex
from verl.page.reader import RunReader, Series
from verl.page.tables import HIDDEN_KEYS, final_context
from verl.page.text import whole_number
from verl.tracking.files import Row
from verl.tracking.progress import says_nothing
from verl.tracking.run_folder import RunFolder

if TYPE_CHECKING:
    from verl.page.pages import View

MAX_POINTS = 1200  # of a curve; above, each bucket of steps shows its smallest and its largest value


@dataclass(frozen=True)
class ChartLine:
    label: str
    steps: Sequence[int]
    values: Sequence[float]
    style: str = "line"  # line, dots, band (the values between two of them), stack
    run: int | None = None  # the number of the run, on a page of several: it decides the colour


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


_SHARE = re.compile(r"share/.*|.*(?:(?<!ppl)_ratio|accurac(?:y|ies)|clipfrac(?:_lower)?)")
_TITLE = re.compile(r"(.*?)(?: \((.*)\))?")  # of a program's panel: title (unit)
_SPECS = (
    _Spec(
        "Response length", {"response_length/mean": "mean"}, "tokens", "mean, shortest and longest of a step",
        ("response_length/min", "response_length/max"),
    ),
    _Spec(
        "Different responses",
        {"response/distinct_ratio": "different", "response/most_frequent_ratio": "the most frequent one"},
        "share", "of the samples of a step; few different ones, and one that leads: the policy collapses",
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
         "perf/cpu_memory_used_gb": "host"},
        "GB",
    ),
    _Spec("Age of the samples", {"training/off_policy/trajectory_staleness/mean": "mean",
                                 "training/off_policy/trajectory_staleness/max": "largest"}, "weight versions"),
    _Spec("Scorers that failed", {"reward/num_defaulted": "samples whose scorer failed"}, "samples"),
)  # fmt: skip


def panels(run: RunReader, index: SampleIndex) -> list[Panel]:
    """The panels of a run that have data, the most important first."""
    declared = [_declared(title, names) for title, names in run.curves.items()]
    files = index.statistics().get("train", [])
    reward = [_reward(run, files)] if run.kind == "rl" else []
    specs = [spec for spec in declared if not (reward and "critic/score/mean" in spec.metrics)]
    builtin = {name for spec in _SPECS for name in spec.metrics}
    # our panel shows more than a panel that the program declares for the same metrics
    specs = [spec for spec in specs if not set(spec.metrics) <= builtin]
    charts = reward + [_panel(run, spec) for spec in (*specs, *_SPECS)]
    return [p for p in (*charts, *_signal(run, files), _plan(run), _phases(run)) if p.lines]


def _declared(title: str, metrics: Mapping[str, str]) -> _Spec:
    """The panel of a program; its title may end with a unit."""
    match = _TITLE.fullmatch(title)
    name, unit = match.groups("") if match else (title, "")
    return _Spec(name[:1].upper() + name[1:], metrics, unit or _unit(metrics))


def _unit(metrics: Iterable[str]) -> str:
    return "share" if all(map(_SHARE.fullmatch, metrics)) else ""


def _panel(run: RunReader, spec: _Spec) -> Panel:
    written = {name: run.metrics[name] for name in spec.metrics if name in run.metrics}
    lines = [
        ChartLine(spec.metrics[name], series.steps, series.values, "dots" if _is_sparse(run, series) else "line")
        for name, series in written.items()
        if not says_nothing(name, series.values)
    ]
    if spec.band is not None and written and all(name in run.metrics for name in spec.band):
        for name in spec.band:
            lines.append(
                ChartLine(name.rpartition("/")[2], run.metrics[name].steps, run.metrics[name].values, style="band")
            )
    return Panel(spec.title, lines, spec.unit, spec.help)


def _is_sparse(run: RunReader, series: Series) -> bool:
    return len(series.steps) < 0.5 * len(run.times)


def _reward(run: RunReader, files: Sequence[sqlite3.Row]) -> Panel:
    defaults = {"critic/score/mean": "training", "val/reward": "held-out", "val/greedy": "held-out, greedy"}
    labels = {name: label for panel in run.curves.values() for name, label in panel.items()}
    names = {name: labels[name] for name in defaults if name in labels} or defaults
    base = _panel(run, _Spec("Reward", names))
    rows = [row for row in files if row["low"] is not None]
    steps = [row["step"] for row in rows]
    band = [ChartLine(label, steps, [row[label] for row in rows], "band") for label in ("low", "high")] if rows else []
    return Panel(
        "Reward", base.lines + band, "", "band: 10th to 90th percentile of the groups' mean rewards; dots: held-out"
    )


def _signal(run: RunReader, files: Sequence[sqlite3.Row]) -> list[Panel]:
    rows = [row for row in files if run.kind == "rl" and row["without_signal"] is not None]  # a pair is no group
    steps = [row["step"] for row in rows]
    equal = ChartLine("", steps, [row["without_signal"] for row in rows])
    spread = ChartLine("mean over the groups", steps, [row["group_spread"] for row in rows])
    return [
        Panel("Groups of equal rewards", [equal], "share", "a group whose rewards are equal trains nothing"),
        Panel("Spread of rewards in a group", [spread], "", "standard deviation"),
    ] if rows else []  # fmt: skip


def _phases(run: RunReader) -> Panel:
    points = thin([row["step"] for row in run.timeline], [row["seconds"] for row in run.timeline])
    rows = [row for row in run.timeline if row["step"] in points]  # the same steps of all phases: they add up
    names = list(dict.fromkeys(name for row in rows for name in row["phases"]))
    steps = [row["step"] for row in rows]
    lines = [ChartLine(n, steps, [row["phases"].get(n, 0.0) for row in rows], "stack") for n in names]
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
        Panel(
            name,
            [ChartLine("", s.steps, s.values)],
            _unit([name]),
            group=name.partition("/")[0] if "/" in name else "other",
        )
        for name, s in sorted(run.metrics.items())
    ]


def charts_json(charts: Iterable[Panel], marks: Sequence[Mapping[str, object]] = ()) -> dict[str, object]:
    """The panels for the browser: one axis of steps and aligned columns each, with null if a line has no point."""
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
    facts = {"title": panel.title, "unit": panel.unit, "help": panel.help, "group": panel.group}
    return {**facts, "x": x, "series": series}


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


_MAX_PROMPTS = 30
_MAX_RUNS = 20


def compare_context(views: Mapping[str, View], query: Mapping[str, str]) -> dict[str, object]:
    """The curves of `runs` in the query, by default of all up to 20; and the runs `a` and `b`, by default the first two."""
    keys = list(views)
    a = query.get("a") if query.get("a") in views else keys[0]
    b = query.get("b") if query.get("b") in views else next((key for key in keys if key != a), a)
    assert a is not None
    assert b is not None
    pair = (views[a], views[b])
    chosen = [key for key in dict.fromkeys(query.get("runs", "").split(",")) if key in views]
    overlaid = [views[key] for key in chosen or ([a, b] if "a" in query else keys)][:_MAX_RUNS]
    for view in {id(view): view for view in (*pair, *overlaid)}.values():
        view.run.refresh()
        view.watch()
    steps = sorted(set(_steps(pair[0])) & set(_steps(pair[1])))
    number = whole_number(query.get("step", ""))
    step = number if number in steps else (steps[-1] if steps else None)
    return {
        "overlaid": [view.run.key for view in overlaid], "a": a, "b": b, "pair": [view.run for view in pair],
        "charts": charts(*overlaid), **different_keys(*pair), "steps": steps, "step": step,
        "prompts": same_prompts(*pair, step) if step is not None else [],
        **final_context([view.run for view in overlaid], query.get("by", "")),
    }  # fmt: skip


def _steps(view: View) -> list[int]:
    return view.index.steps("train")


def different_keys(one: View, other: View) -> dict[str, list[tuple[str, str, str]]]:
    """(key, value here, value there) of the keys that differ: `keys` that one of the runs was given, and `other_keys`."""
    first, second = ({row.key: row for row in RunFolder(view.run.folder).read_keys()} for view in (one, other))
    rows: dict[str, list[tuple[str, str, str]]] = {"keys": [], "other_keys": []}
    for key in sorted(first.keys() | second.keys()):
        pair = [run[key] if key in run else None for run in (first, second)]
        values = [row.value if row else "–" for row in pair]
        if values[0] != values[1] and key not in HIDDEN_KEYS:
            rows["keys" if any(row and row.origin for row in pair) else "other_keys"].append(
                (key, values[0], values[1])
            )
    return rows


def charts(*views: View) -> dict[str, object]:
    """The panels of the runs over each other: the lines of each panel carry the names of their runs."""
    merged: dict[str, Panel] = {}
    for number, view in enumerate(views):
        for panel in panels(view.run, view.index):
            lines = [
                ChartLine(f"{view.run.key}: {line.label}".rstrip(": "), line.steps, line.values, line.style, number)
                for line in panel.lines
                if line.style in ("line", "dots")
            ]
            if lines:
                base = merged.get(panel.title)
                merged[panel.title] = Panel(panel.title, (base.lines if base else []) + lines, panel.unit, panel.help)
    return charts_json(merged.values())


def same_prompts(one: View, other: View, step: int) -> list[dict[str, object]]:
    """The prompts that both runs trained on at `step`, with the group of each; the largest difference in mean reward first."""
    a, b = _groups(one, step), _groups(other, step)
    shared: list[Row] = [{"prompt": a[prompt]["prompt"], "a": a[prompt], "b": b[prompt]} for prompt in a if prompt in b]
    shared.sort(key=lambda row: -abs((row["a"]["mean"] or 0.0) - (row["b"]["mean"] or 0.0)))
    return shared[:_MAX_PROMPTS]


def _groups(view: View, step: int) -> dict[str, dict[str, object]]:
    rows = view.index.rows(
        "SELECT prompt_hash, t.prompt AS prompt, s.unit AS unit, avg(s.score) AS mean, count(*) AS num, "
        "min(s.line) AS line, t.response AS response FROM samples s JOIN files f ON f.id = s.file "
        "JOIN shown t ON t.id = s.id WHERE f.split = 'train' AND f.step = ? GROUP BY s.unit", step,
    )  # fmt: skip
    return {row["prompt_hash"]: dict(row) for row in rows}
