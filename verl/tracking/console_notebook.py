"""Output of a run in a notebook: one display that is updated step by step, in place of an output for each line."""

import io
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rich.console import Console as RichConsole

from verl.tracking.console import Console, StepMetrics
from verl.tracking.files import Json
from verl.tracking.summary import Summary

_NUM_LINES = 12
_MIN_UPDATE_S = 0.5  # between two updates of a phase; a notebook keeps up with a few a second
_WIDTH, _HEIGHT = 480, 120
_COLOURS = ("#0b57b7", "#c2410c")  # of training, and of validation

Points = list[tuple[int, float]]


class _Lines(io.TextIOBase):
    """A stream that gives its finished lines to `add`."""

    def __init__(self, add: Any):
        self._add, self._text = add, ""

    def write(self, text: str) -> int:
        *lines, self._text = (self._text + text).split("\n")
        for line in lines:
            self._add(line)
        return len(text)


class NotebookConsole(Console):
    """A Console with its newest plain lines under a bar and a curve of the first metric with its validation. Facts, and all
    warnings, are kept."""

    def __init__(self, *, steps: bool = True):
        self._lines_shown, self._facts, self._warnings = deque[str](maxlen=_NUM_LINES), list[str](), list[str]()
        self._curves: dict[str, Points] = {"training": [], "held-out": []}
        self._main = self._label = self._phase = ""
        self._state, self._handle, self._updated = "starting", None, 0.0
        self._lock = threading.RLock()  # records are logged by threads too
        plain = RichConsole(file=_Lines(self._add), force_jupyter=False, force_terminal=False, color_system=None)  # type: ignore[arg-type]
        super().__init__(steps=steps, rich_console=plain)

    def _add(self, line: str) -> None:
        with self._lock:
            is_warning = line.startswith(("WARNING", "ERROR", "CRITICAL", "notice:"))
            (self._warnings if is_warning else self._lines_shown).append(line)
            if is_warning:
                self._update()

    def header(self, facts: Json) -> None:
        """See Console."""
        before = list(self._lines_shown)
        self._lines_shown = deque[str]()
        super().header(facts)
        self._facts, self._lines_shown = [*before, *self._lines_shown], deque(maxlen=_NUM_LINES)
        self._update()

    def begin(self, done: int, total: int, metrics: StepMetrics, step_s: float | None = None) -> None:
        """See Console."""
        super().begin(done, total, metrics, step_s)
        self._main = next(iter(metrics), "")
        self._label = metrics[self._main][0] if self._main else ""
        self._update()

    def phase(self, name: str) -> None:
        """See Console."""
        super().phase(name)
        self._state = name
        if time.monotonic() - self._updated > _MIN_UPDATE_S:
            self._update()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """See Console."""
        super().step(step, metrics)
        if metrics.get(self._main) is not None:
            self._curves["training"].append((step, metrics[self._main]))
        self._update()

    def validation(self, step: int | None, metrics: Mapping[str, float]) -> None:
        """See Console."""
        super().validation(step, metrics)
        names = (f"val/{self._main.removeprefix('train/')}", "val/reward", "val/greedy")
        value = next((metrics[name] for name in names if name in metrics), None)
        if step is not None and value is not None:
            self._curves["held-out"].append((step, value))
        self._update()

    def final(self, summary: Summary) -> None:
        """See Console."""
        super().final(summary)
        self._state = "finished"
        self._update()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._state = "stopped" if error[0] is not None else self._state if self._total else "finished"
        self._update()

    def _update(self) -> None:
        from IPython.display import display  # only in a notebook

        with self._lock:
            self._updated = time.monotonic()
            content = {"text/html": self.html(), "text/plain": "\n".join([*self._warnings, *self._lines_shown])}
            if self._handle is None:
                self._handle = display(content, raw=True, display_id=True)
            else:
                self._handle.update(content, raw=True)

    def html(self) -> str:
        """The content of the display."""
        duration = self._left()
        state = f"step {self._done} of {self._total} · {self._state}" + (
            f" · {duration} left" * (self._done < self._total) if duration else ""
        )
        bar = f'<progress style="width:{_WIDTH}px" max="{self._total}" value="{self._done}"></progress>'
        if not self._total:  # an evaluation, or a run that loads
            state, bar = self._state, ""
        facts = f"<details><summary>settings</summary>{_pre(self._facts)}</details>" if self._facts else ""
        return (
            f"<div><b>verl</b> {escape(state)}<br>{bar}{_chart(self._label, self._curves)}{_pre(self._warnings, '#b3261e')}"
            f"{_pre(self._lines_shown)}{facts}</div>"
        )


def _pre(lines: Sequence[str], colour: str = "inherit") -> str:
    style = f"white-space:pre-wrap;margin:4px 0;font-size:12px;color:{colour}"
    return f'<pre style="{style}">{escape(chr(10).join(lines))}</pre>' if lines else ""


def _chart(label: str, curves: Mapping[str, Points]) -> str:
    """The curves of a metric as a picture: a line of training, dots of validation, and the range of the axis."""
    points = [point for curve in curves.values() for point in curve]
    if len(points) < 2:
        return ""
    steps, values = zip(*points, strict=True)
    low, high, first, last = min(values), max(values), min(steps), max(steps)

    def place(point: tuple[int, float]) -> str:
        x = 4 + (_WIDTH - 8) * (point[0] - first) / max(last - first, 1)
        return f"{x:.1f},{_HEIGHT - 6 - (_HEIGHT - 12) * (point[1] - low) / ((high - low) or 1.0):.1f}"

    line = " ".join(map(place, curves["training"]))
    dots = "".join(
        '<circle cx="{}" cy="{}" r="3" fill="{}"/>'.format(*place(p).split(","), _COLOURS[1])
        for p in curves["held-out"]
    )
    newest = ", ".join(f"{name} {curve[-1][1]:.3g}" for name, curve in curves.items() if curve)
    return (
        f'<div style="font-size:12px">{escape(label)}: {newest} (axis {low:.3g} to {high:.3g})</div>'
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" style="border:1px solid #8884"><polyline points="{line}" fill="none" '
        f'stroke="{_COLOURS[0]}" stroke-width="1.5"/>{dots}</svg>'
    )
