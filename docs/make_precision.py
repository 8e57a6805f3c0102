"""Writes the figures of precision.md and its picture from those of benchmarks/peers/time_to_reward.py.

    python docs/make_precision.py figures.json more.json     # --json files of the benchmark, one or more per processor
    python docs/make_precision.py                            # the page again, from docs/precision.json

The figures that the page needs are kept in docs/precision.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE, FIGURES, PICTURE = (ROOT / "docs" / name for name in ("precision.md", "precision.json", "precision.svg"))
BEGIN = "<!-- results: written by docs/make_precision.py, do not edit -->"
END = "<!-- end of the results -->"
LABELS = {"float32": "float32", "nearest": "bfloat16, nearest", "dithered": "bfloat16, dithered"}
COLORS = {"float32": "#333333", "nearest": "#c0504d", "dithered": "#2f6db5"}

Row = dict[str, Any]


def reduced(benchmark: dict[str, Any]) -> list[Row]:
    """The runs of ours in a --json file of the benchmark: processor, side, seed, seconds per step, rewards by step."""
    return [
        {
            "processor": benchmark["machine"]["processor"],
            "side": run["side"],
            "seed": run["seed"],
            "step_s": round(mean(step["step_s"] for step in run["steps"]), 2),
            "rewards": [
                [p["step"], round(p["sampled"], 4), p["greedy"] and round(p["greedy"], 4)] for p in run["points"]
            ],
        }
        for run in benchmark["results"]["runs"]
        if run["side"] in LABELS and run["steps"]
    ]


def stored() -> list[Row]:
    return json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else []


def figures_block(rows: list[Row]) -> str:
    """The generated part of the page."""
    if not rows:
        return "No results have been written yet."
    lines = [f"![Held-out reward over training steps]({PICTURE.name})", ""]
    lines += ["| processor | precision | seeds | steps | sampled reward | greedy reward | seconds per step |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for processor in dict.fromkeys(row["processor"] for row in rows):
        for side, label in LABELS.items():
            runs = [row for row in rows if (row["processor"], row["side"]) == (processor, side)]
            if runs:
                ends = [(run["rewards"][0], run["rewards"][-1]) for run in runs]
                cells = [processor, label, str(len(runs)), "/".join(sorted({str(last[0]) for _, last in ends}))]
                cells += [_change(ends, 1), _change(ends, 2), f"{mean(run['step_s'] for run in runs):.1f}"]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _change(ends: list[tuple[list[Any], list[Any]]], column: int) -> str:
    """ "0.150 -> 0.700": means over the seeds with both values, before training and after the last step."""
    known = [pair for pair in ends if all(end[column] is not None for end in pair)]
    return " -> ".join(f"{mean(pair[i][column] for pair in known):.3f}" for i in (0, 1)) if known else "-"


def page() -> str:
    """The page as it should be."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{head}{BEGIN}\n{figures_block(stored())}\n{END}{rest.partition(END)[2]}"


def draw(rows: list[Row]) -> None:
    """Held-out sampled reward over steps: a line per seed, a panel per processor."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "precision"  # the same figures give the same file
    processors = list(dict.fromkeys(row["processor"] for row in rows))
    figure = Figure(figsize=(6.5 * len(processors), 4), layout="constrained", facecolor="white")
    FigureCanvasSVG(figure)
    for axes, processor in zip(figure.subplots(1, len(processors), squeeze=False)[0], processors, strict=True):
        drawn: set[str] = set()
        for row in (row for row in rows if row["processor"] == processor):
            steps, sampled = [r[0] for r in row["rewards"]], [r[1] for r in row["rewards"]]
            label = None if row["side"] in drawn else LABELS[row["side"]]
            axes.plot(steps, sampled, color=COLORS[row["side"]], marker="o", markersize=3, label=label)
            drawn.add(row["side"])
        axes.set(title=processor, xlabel="training step", ylabel="held-out reward (sampled)")
        axes.grid(color="#e4e4e4")
        axes.legend(frameon=False)
    figure.savefig(PICTURE, metadata={"Date": None})


def main(files: list[str]) -> None:
    if files:
        rows = [row for file in files for row in reduced(json.loads(Path(file).read_text(encoding="utf-8")))]
        FIGURES.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")
        draw(rows)
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
