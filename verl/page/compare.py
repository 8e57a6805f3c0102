"""Curves of several runs over each other; of two runs the config, and the same prompt at the same step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verl.page import panels
from verl.page.text import whole_number
from verl.tracking.run_folder import RunFolder

if TYPE_CHECKING:
    from verl.page.pages import View

_MAX_PROMPTS = 30
_MAX_RUNS = 20
_HIDDEN = ("trainer.default_local_dir", "trainer.experiment_name")


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
    asked = whole_number(query.get("step", ""))
    step = asked if asked in steps else (steps[-1] if steps else None)
    return {
        "overlaid": [view.run.key for view in overlaid], "a": a, "b": b, "pair": [view.run for view in pair],
        "charts": charts(*overlaid), "keys": different_keys(*pair), "steps": steps, "step": step,
        "prompts": same_prompts(*pair, step) if step is not None else [],
    }  # fmt: skip


def _steps(view: View) -> list[int]:
    return view.index.steps("train")


def different_keys(one: View, other: View) -> list[tuple[str, str, str]]:
    """(key, value here, value there) of the keys that differ."""
    values = [{row.key: row.value for row in RunFolder(view.run.folder).read_keys()} for view in (one, other)]
    return [
        (key, values[0].get(key, "–"), values[1].get(key, "–"))
        for key in sorted(values[0].keys() | values[1].keys())
        if values[0].get(key) != values[1].get(key) and key not in _HIDDEN
    ]


def charts(*views: View) -> dict[str, object]:
    """The panels of the runs over each other: the lines of each panel carry the names of their runs."""
    merged: dict[str, panels.Panel] = {}
    for number, view in enumerate(views):
        for panel in panels.panels(view.run, view.index):
            lines = [
                panels.ChartLine(
                    f"{view.run.key}: {line.label}".rstrip(": "), line.steps, line.values, line.style, number
                )
                for line in panel.lines
                if line.style in ("line", "dots")
            ]
            if lines:
                known = merged.get(panel.title)
                merged[panel.title] = panels.Panel(
                    panel.title, (known.lines if known else []) + lines, panel.unit, panel.help
                )
    return panels.charts_json(merged.values())


def same_prompts(one: View, other: View, step: int) -> list[dict[str, object]]:
    """The prompts that both runs trained on at `step`, with the group of each; the largest difference in mean reward first."""
    a, b = _groups(one, step), _groups(other, step)
    shared: list[dict[str, Any]] = [
        {"prompt": a[prompt]["prompt"], "a": a[prompt], "b": b[prompt]} for prompt in a if prompt in b
    ]
    shared.sort(key=lambda row: -abs((row["a"]["mean"] or 0.0) - (row["b"]["mean"] or 0.0)))
    return shared[:_MAX_PROMPTS]


def _groups(view: View, step: int) -> dict[str, dict[str, object]]:
    rows = view.index.rows(
        "SELECT prompt_hash, t.prompt AS prompt, s.unit AS unit, avg(s.score) AS mean, count(*) AS num, "
        "min(s.line) AS line, t.response AS response FROM samples s JOIN files f ON f.id = s.file "
        "JOIN shown t ON t.id = s.id WHERE f.split = 'train' AND f.step = ? GROUP BY s.unit", step,
    )  # fmt: skip
    return {row["prompt_hash"]: dict(row) for row in rows}
