"""The learning curve of a run as a picture; needs matplotlib, the extra `plot`."""

from __future__ import annotations

import importlib.util
import itertools
import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.tracking.files import read_metrics
from verl.tracking.run_folder import RunFolder

log = logging.getLogger(__name__)

_INK, _GRID = "#333333", "#e4e4e4"
_COLORS = ("#2f6db5", "#d9822b", "#2f9e6b", "#c0504d")
_MAX_SMALL = 3  # panels below the large one

Rows = Sequence[Mapping[str, Any]]
Points = tuple[list[float], list[float]]


def draw_learning_curve(folder: RunFolder) -> Path | None:
    """Plot the curves of `folder` (curves.json) into learning_curve.png; None, and no file, when no step has trained. A single
    row is no curve, and importing matplotlib takes a second.

    The first panel is large; its validation metrics are dots with values. Without matplotlib, and after a failure, a line is
    logged and nothing is raised: a picture must not fail a run.
    """
    rows, curves = list(read_metrics(folder.metrics)), list(folder.read_curves().items())
    trains = curves and any(_points(rows, name)[0] for name in curves[0][1] if not _is_validation(name))
    if len(rows) < 2 or not trains:
        return None
    if importlib.util.find_spec("matplotlib") is None:
        log.info("The learning curve is not plotted: matplotlib is missing. To plot it, install verl[plot].")
        return None
    try:
        _draw(rows, curves, folder.learning_curve, folder.root.name)
    except Exception as error:  # noqa: BLE001 - see the docstring; a plotting library may raise anything
        log.warning("The learning curve was not plotted: %s: %s", type(error).__name__, error)
        return None
    return folder.learning_curve


def _draw(rows: Rows, curves: Sequence[tuple[str, Mapping[str, str]]], path: Path, title: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # no pyplot: its state and its choice of backend belong to the caller's process
    figure = Figure(figsize=(10, 6.6), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    (name, lines), *others = curves
    small = others[:_MAX_SMALL]
    grid = figure.add_gridspec(2 if small else 1, max(len(small), 1), height_ratios=(2.0, 1.0)[: 2 if small else 1])
    _draw_large(figure.add_subplot(grid[0, :]), rows, f"{title}: {name}", lines)
    for column, (heading, metrics) in enumerate(small):
        _draw_small(figure.add_subplot(grid[1, column]), rows, heading, metrics, first_color=column)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # opening a pipe would block
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a run folder may have any name
        figure.savefig(temporary, format="png")
    temporary.replace(path)


def _draw_large(axes: Any, rows: Rows, title: str, lines: Mapping[str, str]) -> None:
    _style(axes, title)
    offsets = itertools.cycle(
        (-16, 8)
    )  # labels of two curves are on different sides, so that close points are readable
    for color, (name, label) in zip(itertools.cycle(_COLORS), lines.items(), strict=False):
        steps, values = _points(rows, name)
        if not steps:
            continue
        if not _is_validation(name):
            axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
            axes.plot(steps, smooth(values), color=color, linewidth=2, label=f"{label}, smoothed")
            continue
        axes.plot(steps, values, color=color, marker="o", markersize=5, linewidth=1.5, label=label)
        offset = next(offsets)
        for i in {0, len(steps) - 1}:
            axes.annotate(
                f"{values[i]:.3f}", (steps[i], values[i]), textcoords="offset points", xytext=(0, offset), ha="center",
                fontsize=9, color=color,
            )  # fmt: skip
    axes.set_xlabel("step", color=_INK)
    axes.margins(x=0.03, y=0.12)
    axes.legend(frameon=False, loc="best")


def _draw_small(axes: Any, rows: Rows, title: str, lines: Mapping[str, str], first_color: int) -> None:
    _style(axes, title)
    measured = {name: points for name in lines if (points := _points(rows, name))[0]}
    for index, (name, (steps, values)) in enumerate(measured.items()):
        color = _COLORS[(first_color + index) % len(_COLORS)]
        axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
        axes.plot(steps, smooth(values), color=color, linewidth=1.6, label=lines[name])
    if not measured:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center", color="#999999")
        axes.set(xticks=[], yticks=[])
    elif len(lines) > 1:
        axes.legend(frameon=False, fontsize=8)


def _style(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", color=_INK, fontsize=11)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, labelsize=9, length=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    for side in axes.spines.values():
        side.set_visible(False)


def _is_validation(name: str) -> bool:
    return name.startswith("val")


def _points(rows: Rows, name: str) -> Points:
    """(steps, values) of the rows that have a value of `name`."""
    points = [(row["step"], row[name]) for row in rows if name in row]
    return [step for step, _ in points], [value for _, value in points]


def smooth(values: Sequence[float]) -> list[float]:
    """Centred mean over about a tenth of the points, fewer at the ends."""
    half = max(len(values) // 20, 1)
    totals = [0.0, *itertools.accumulate(map(float, values))]
    windows = ((max(i - half, 0), min(i + half, len(values) - 1) + 1) for i in range(len(values)))
    return [(totals[stop] - totals[start]) / (stop - start) for start, stop in windows]
