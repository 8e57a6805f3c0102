"""The picture of docs/scale.md, from its tables: cost against size, both as multiples of the smallest size's.

python docs/make_scale.py
"""

from __future__ import annotations

import math
from pathlib import Path

DOCUMENT = Path(__file__).with_name("scale.md")
ROWS = {  # of the tables -> label
    "seconds to the first step, second start": "start, with rows",
    "seconds to record and sync a step of 1,024 samples": "commit of a step, with samples in the ledger",
    "seconds to count the outcomes (`verl show`, page)": "count of the ledger's outcomes, with samples",
    "seconds of `verl show`": "verl show, with steps",
    "seconds to the page's first view": "first view of the page, with steps",
    "ms of the driver's main thread": "driver's time of a sample, with samples of a step",
    "ms of a call on all": "call on all Ray actors, with actors",
}
COLORS = ("#1b6ca8", "#d1495b", "#2e8b57", "#e09f3e", "#6a4c93", "#444444", "#00897b")
_LEFT, _TOP, _SIDE, _DECADES = 50, 20, 340, 4  # pixels of the square of the axes


def picture(document: str) -> str:
    """An SVG with a line for each of `ROWS`, and a dashed one for cost that is proportional to size."""
    parts, sizes, left = [], list[float](), dict(ROWS)
    for power in range(_DECADES):
        x, y = _place(power, power)
        parts.append(_text(x, _TOP + _SIDE + 16, f"{10**power:,}", "middle"))
        parts.append(_text(_LEFT - 6, y + 4, f"{10**power:,}", "end"))
    parts.append(_line([(0, 0), (_DECADES, _DECADES)], "#aaaaaa", ' stroke-dasharray="4 4"'))
    for line in document.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[-1] == "exponent":
            sizes = [float(cell.replace(",", "")) for cell in cells[1:-1]]
        elif cells[0] in left:
            label, number = left.pop(cells[0]), len(ROWS) - len(left) - 1
            costs = [float(cell.replace(",", "")) for cell in cells[1:-1]]
            points = [(math.log10(x / sizes[0]), math.log10(y / costs[0])) for x, y in zip(sizes, costs, strict=True)]
            parts.append(_line(points, COLORS[number], ' stroke-width="2"'))
            parts.append(_text(_LEFT + _SIDE + 20, _TOP + 20 + 22 * number, label, "start", COLORS[number]))
    parts.append(_text(_LEFT + _SIDE // 2, _TOP + _SIDE + 34, "size, as a multiple of the smallest", "middle"))
    parts.append(_text(_LEFT, _TOP - 6, "cost, as a multiple; dashed: proportional to size", "start"))
    axes = f'<path d="M{_LEFT},{_TOP} v{_SIDE} h{_SIDE}" fill="none" stroke="#444444"/>'
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 400" font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="720" height="400" fill="white"/>', axes, *parts, "</svg>"]) + "\n"


def _place(x: float, y: float) -> tuple[float, float]:
    """Pixels of a point in decades."""
    return round(_LEFT + _SIDE * x / _DECADES, 1), round(_TOP + _SIDE * (1 - (y + 0.5) / (_DECADES + 0.5)), 1)


def _line(points: list[tuple[float, float]], color: str, more: str) -> str:
    places = " ".join("{},{}".format(*_place(x, y)) for x, y in points)
    return f'<polyline points="{places}" fill="none" stroke="{color}"{more}/>'


def _text(x: float, y: float, text: str, anchor: str, color: str = "#222222") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{color}">{text}</text>'


if __name__ == "__main__":
    DOCUMENT.with_suffix(".svg").write_text(picture(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
