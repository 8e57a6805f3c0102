"""Terminal output of a run: header, live bar, one line per step, closing table; plain lines when not a terminal."""

from __future__ import annotations

import logging
import math
import os
import re
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from rich import box
from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
)
from rich.table import Table
from rich.text import Text

from verl.foreign_text import clean
from verl.tracking.files import Json
from verl.tracking.logs import add_handler, log_level, once, remove_handler, terminal_handler
from verl.tracking.summary import Result, Summary
from verl.tracking.timeline import duration

_MAX_CHARS = 2000  # of a fact
_MORE_WIDTH = 14  # of "  and 123 more"
_NUM_RECENT = 20  # steps whose mean time estimates the rest

_MEAN_REWARD = re.compile(r"val-core/.*/(reward|acc)/mean@\d+")  # of a data source

StepMetrics = Mapping[str, tuple[str, str]]  # metric -> (short name, format), in the order of the line of a step

# of every program, after its own
_HOST_METRICS = {"perf/throughput": ("tokens_per_s", "{:.0f}"), "perf/time_per_step": ("seconds", "{:.1f}")}
_UNITS = {"tokens_per_s": " tok/s", "seconds": " s"}


def is_notebook() -> bool:
    """Whether this process displays in a notebook."""
    return RichConsole().is_jupyter


class _Clock(ProgressColumn):
    """A text that changes with time, at the end of the bar."""

    def __init__(self, text: Callable[[], str]):
        super().__init__()
        self._text = text

    def render(self, task: Task) -> Text:
        return Text(self._text())


class Console:
    """While entered, log records go through it, so that they do not break the live bar. `steps=False` leaves out the lines
    and the bar of the steps; `rich_console` is the output (default: standard output)."""

    def __init__(self, *, steps: bool = True, rich_console: RichConsole | None = None):
        lost = getattr(sys.stdout, "closed", False)
        self.rich = rich_console or RichConsole(file=open(os.devnull, "w") if lost else None)
        self.steps = steps
        self._metrics: StepMetrics = _HOST_METRICS
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._handler: logging.Handler | None = None
        self._quiet = ExitStack()
        self._done = self._total = 0
        self._recent: deque[float] = deque(maxlen=_NUM_RECENT)
        self._last_end = self._phase_began = time.monotonic()

    def __enter__(self) -> Console:
        handler = terminal_handler(self.rich)
        handler.setLevel(log_level())
        self._quiet.enter_context(once(handler))
        self._handler = add_handler(handler)
        return self

    def __exit__(self, *error: object) -> None:
        self._stop_bar()
        if self._handler is not None:
            self._quiet.close()
            remove_handler(self._handler)
            self._handler = None

    def header(self, facts: Json) -> None:
        """Facts of the run; the list under `notices`, one sentence each, comes below them."""
        facts = dict(facts)
        notices = [clean(notice, limit=_MAX_CHARS) for notice in facts.pop("notices", None) or []]
        if not self.rich.is_terminal:
            self._lines(
                [*(f"{name}: {_fact(value)}" for name, value in facts.items()), *(f"notice: {n}" for n in notices)]
            )
            return
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", justify="right", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in facts.items():
            table.add_row(name, Text(_fact(value)))
        parts: list[RenderableType] = [table]
        if notices:
            parts.append(Text("\n".join(["", *(f"• {notice}" for notice in notices)]), style="yellow"))
        self.rich.print(
            Panel(Group(*parts), title="[bold]verl", title_align="left", border_style="cyan", box=box.ROUNDED)
        )

    def begin(self, done: int, total: int, metrics: StepMetrics, step_s: float | None = None) -> None:
        """Start after step `done` of `total`. `metrics` are the program's for the line of a step; the first is also shown next
        to the bar. `step_s`: the expected seconds of the next step, where they are known."""
        self._done, self._total, self._metrics = done, total, {**metrics, **_HOST_METRICS}
        self._recent.extend([] if step_s is None else [step_s])
        self._last_end = self._phase_began = time.monotonic()
        if not (self.steps and self.rich.is_terminal and done < total):
            return
        self._progress = Progress(
            SpinnerColumn(), TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=24),
            TextColumn("{task.fields[phase]}", style="cyan", markup=False), _Clock(self._clock),
            TextColumn("{task.fields[status]}"), console=self.rich, transient=True,
        )  # fmt: skip
        self._task = self._progress.add_task("", total=total, completed=done, phase="starting", status="")
        self._progress.start()
        sys.addaudithook(self._step_aside)

    def _step_aside(self, event: str, arguments: tuple[object, ...]) -> None:
        """Take the bar from the terminal for a debugger; the next step brings it back."""
        if event in ("builtins.breakpoint", "pdb.Pdb") and self._progress is not None:
            self._progress.stop()

    def phase(self, name: str) -> None:
        """Show the current phase, and its seconds, next to the bar."""
        self._phase_began = time.monotonic()
        if self._progress is not None:
            self._progress.update(self._task, phase=clean(name))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line of a finished step and advance the bar. Metrics that were not measured are left out."""
        # wall time between steps, so that the estimate includes validations and checkpoints
        now = time.monotonic()
        self._recent.append(now - self._last_end)
        self._last_end, self._done = now, step
        if not self.steps:
            return
        values = [
            (short, form.format(metrics[name]))
            for name, (short, form) in self._metrics.items()
            if metrics.get(name) is not None
        ]
        if not self.rich.is_terminal:
            self._lines(
                [" ".join([f"step={step}/{self._total}", *(f"{n}={v}" for n, v in values), f"left={self._left()}"])]
            )
            return
        self.rich.print(_step_line(step, self._total, values))
        if self._progress is not None:
            self._progress.start()  # again, after a debugger
            parts = [f"{name} {value}" for name, value in values[:1] if name not in _UNITS]
            parts += [f"{value}{_UNITS[name]}" for name, value in values if name == "tokens_per_s"]
            self._progress.update(self._task, completed=step, status=" · ".join(parts))

    def _left(self) -> str:
        """The time to the end of the run by the mean of the recent steps; "" before a step has ended."""
        if not self._recent:
            return ""
        seconds_left = statistics.mean(self._recent) * (self._total - self._done) - (time.monotonic() - self._last_end)
        return duration(max(seconds_left, 0.0))

    def _clock(self) -> str:
        seconds_left = self._left()
        return duration(time.monotonic() - self._phase_began) + (f" · {seconds_left} left" if seconds_left else "")

    def validation(self, step: int | None, metrics: Mapping[str, float]) -> None:
        """Print one line: the metrics `val/*` after `step` (0: before training, None: without any), then `val-core/*`. The line
        repeats no value. In a terminal, metrics that do not fit on the line are counted."""
        metrics = dict(metrics)
        if (reward := metrics.get("val/reward")) is not None:
            means = [name for name in metrics if _MEAN_REWARD.fullmatch(name)]
            repeated = ["val/greedy", *means] if len(means) == 1 else ["val/greedy"]
            for name in repeated:  # of a greedy validation, and of the only data source
                if math.isclose(metrics.get(name, math.nan), reward):
                    del metrics[name]
        values, core = (
            [(clean(name.removeprefix(prefix)), f"{v:.3f}") for name, v in metrics.items() if name.startswith(prefix)]
            for prefix in ("val/", "val-core/")
        )
        if not values and not core:
            return
        if not self.rich.is_terminal:
            head = "validation" if step is None else f"validation step={step}"
            self._lines([" ".join([head, *(f"{n}={v}" for n, v in [*values, *core])])])
            return
        when = "" if step is None else f" after step {step}" if step else " before training"
        line, room = Text(f"validation{when}", style="bold magenta"), self.rich.width - _MORE_WIDTH
        for number, (label, value) in enumerate([*values, *core]):
            if line.cell_len + len(label) + len(value) + 3 > room and number:
                line.append(f"  and {len(values) + len(core) - number} more", style="not bold dim")
                break
            line.append(f"  {label} ", style="not bold dim").append(value, style="bold")
        self.rich.print(line, no_wrap=True, overflow="ellipsis")

    def final(self, summary: Summary) -> None:
        """Print the closing table: results before and after, and the time taken."""
        self._stop_bar()
        rows = [r for r in summary.results if r.label and (r.before, r.after) != (None, None)]
        took = f"{summary.steps} step{'' if summary.steps == 1 else 's'} in {duration(summary.seconds)}"
        if summary.tokens_per_s:
            took += f", {summary.tokens_per_s:,.0f} tokens/s"
        if not self.rich.is_terminal:
            self._lines([*map(_change, rows), f"{took} on {summary.device}"])
            return
        table = Table(box=box.ROUNDED, border_style="cyan", title="[bold]Result", title_justify="left")
        for name in ("", "before", "after", "change"):
            table.add_column(name, justify="right" if name else "left")
        for r in rows:
            change = "-" if r.before is None or r.after is None else f"{r.after - r.before:+.3f}"
            table.add_row(r.label, _value(r.before), Text(_value(r.after), style="bold"), change)
        for name, seconds in sorted(summary.phase_seconds.items(), key=lambda item: -item[1])[:5]:
            table.add_row(Text(f"time in {name}", style="dim"), "", Text(duration(seconds), style="dim"), "")
        table.caption = f"{took} on {summary.device}"
        self.rich.print(table)

    def _lines(self, lines: list[str]) -> None:
        for line in lines:
            self.rich.print(line, soft_wrap=True, markup=False, highlight=False)

    def _stop_bar(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _step_line(step: int, total: int, parts: list[tuple[str, str]]) -> Text:
    line = Text(f"{step:>{len(str(total))}}/{total}", style="bold")
    for index, (name, value) in enumerate(parts):
        if name in _UNITS:
            line.append(f"  {value}{_UNITS[name]}", style="not bold")
        else:
            line.append(f"  {name} ", style="not bold dim").append(value, style="not bold" if index else "bold green")
    return line


def _fact(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else clean(value, limit=_MAX_CHARS)


def _change(result: Result) -> str:
    """The line of a result: its values before and after training, if both were measured."""
    if result.after is None:
        return f"{result.label}: {_value(result.before)} before training, not validated after it"
    return (
        f"{result.label}: " + (f"{result.before:.3f} -> " if result.before is not None else "") + _value(result.after)
    )


def _value(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
