"""The learning curve of a run as a picture."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl.tracking.files import read_rows
from verl.tracking.run_folder import RunFolder

log = logging.getLogger(__name__)

_INK, _GRID = "#333333", "#e4e4e4"
_BLUE, _ORANGE, _GREEN, _RED = "#2f6db5", "#d9822b", "#2f9e6b", "#c0504d"

Points = tuple[list[float], list[float]]


def draw_learning_curve(folder: RunFolder) -> Path | None:
    """Draw the metrics of `folder` into learning_curve.png; None (and no file) when no step has trained.

    A failure is logged and not raised: a picture is never worth a run.
    """
    rows = [row for row in read_rows(folder.metrics) if "step" in row]
    if len(_points(rows, "critic/score/mean")[0]) == 0:
        return None
    try:
        _draw(rows, folder.learning_curve, folder.root.name)
    except Exception as error:  # noqa: BLE001 - see the docstring; a plotting library may raise anything
        log.warning("The learning curve was not drawn: %s: %s", type(error).__name__, error)
        return None
    return folder.learning_curve


def _draw(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # no pyplot: its state and its choice of backend belong to the caller's process
    figure = Figure(figsize=(10, 6.6), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 3, height_ratios=(2.0, 1.0))
    _draw_reward(figure.add_subplot(grid[0, :]), rows, title)
    _draw_small(
        figure.add_subplot(grid[1, 0]), rows, "response length (tokens)", {"response_length/mean": (_BLUE, "mean")}
    )
    _draw_small(figure.add_subplot(grid[1, 1]), rows, "entropy (nats)", {"actor/entropy": (_GREEN, "entropy")})
    _draw_small(
        figure.add_subplot(grid[1, 2]), rows, "KL",
        {"actor/ppo_kl": (_RED, "to the old policy"), "actor/kl_loss": (_ORANGE, "to the reference")},
    )  # fmt: skip
    temporary = path.with_name(f".{path.name}.tmp")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a run folder may have any name
        figure.savefig(temporary, format="png")
    temporary.replace(path)


def _draw_reward(axes: Any, rows: list[dict[str, Any]], title: str) -> None:
    steps, rewards = _points(rows, "critic/score/mean")
    _style(axes, f"{title}: mean reward")
    axes.plot(steps, rewards, color=_BLUE, alpha=0.25, linewidth=1)
    axes.plot(steps, smooth(rewards), color=_BLUE, linewidth=2, label="training, smoothed")
    # the labels of the two curves stand on different sides, so that close points stay readable
    curves = (("val/reward", _ORANGE, "held-out, sampled", -16), ("val/greedy", _GREEN, "held-out, greedy", 8))
    for name, color, label, offset in curves:
        steps, values = _points(rows, name)
        if not steps:
            continue
        axes.plot(steps, values, color=color, marker="o", markersize=5, linewidth=1.5, label=label)
        for i in {0, len(steps) - 1}:
            axes.annotate(
                f"{values[i]:.3f}", (steps[i], values[i]), textcoords="offset points", xytext=(0, offset), ha="center",
                fontsize=9, color=color,
            )  # fmt: skip
    axes.set_xlabel("step", color=_INK)
    axes.margins(x=0.03, y=0.12)
    axes.legend(frameon=False, loc="best")


def _draw_small(axes: Any, rows: list[dict[str, Any]], title: str, lines: dict[str, tuple[str, str]]) -> None:
    _style(axes, title)
    drawn = 0
    for name, (color, label) in lines.items():
        steps, values = _points(rows, name)
        if steps:
            axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
            axes.plot(steps, smooth(values), color=color, linewidth=1.6, label=label)
            drawn += 1
    if not drawn:
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


def _points(rows: list[dict[str, Any]], name: str) -> Points:
    """(steps, values) of the rows that have a value of `name`."""
    found = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def smooth(values: Sequence[float]) -> np.ndarray:
    """Centred mean over about a tenth of the points; at the ends over those of them that there are."""
    data = np.asarray(values, dtype=np.float64)
    half = max(len(data) // 20, 1)
    total = np.concatenate([[0.0], np.cumsum(data)])
    index = np.arange(len(data))
    first, last = np.maximum(index - half, 0), np.minimum(index + half, len(data) - 1)
    return (total[last + 1] - total[first]) / (last + 1 - first)
