"""Checklists on the terminal: one line per finding; a failure sets the exit code."""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Literal

from verl.foreign_text import printable

try:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
except ImportError:  # `verl doctor` says so, and needs the standard library only

    class Console:  # type: ignore[no-redef]
        """Plain lines."""

        is_terminal = False

        def __init__(self, **settings: object):
            pass

        def print(self, text: object, **settings: object) -> None:
            print(text)

    def Text(text: str, **settings: object) -> str:  # type: ignore[no-redef]
        return text


Level = Literal["pass", "info", "warn", "fail", "skip"]
_STYLES = {"pass": "green", "info": "cyan", "warn": "yellow", "fail": "bold red", "skip": "dim"}


@dataclass(frozen=True)
class Line:
    """One finding. `skip`: a check that another finding prevents."""

    level: Level
    text: str


passed = partial(Line, "pass")
info = partial(Line, "info")
warn = partial(Line, "warn")
fail = partial(Line, "fail")
skip = partial(Line, "skip")


class Report:
    """Prints lines under their topic, and counts them by level."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(highlight=False)
        self.counts: Counter[str] = Counter()
        self._topic = ""

    def add(self, topic: str, line: Line) -> None:
        """Print one line; the topic is shown before its first line only."""
        self.counts[line.level] += 1
        topic = printable(topic).replace("\n", "\\n")  # of a file's name
        heading = "" if topic == self._topic else topic
        self._topic = topic
        text = printable(line.text)
        if not self.console.is_terminal:  # a log file: one line each, not folded
            self.console.print(f"{line.level:<4}  {topic:<10}  {text}", soft_wrap=True, markup=False)
            return
        row = Table.grid(padding=(0, 2, 0, 0))
        row.add_column(width=4)
        row.add_column(width=10)
        row.add_column(overflow="fold")
        row.add_row(Text(line.level, style=_STYLES[line.level]), Text(heading, style="bold"), Text(text))
        self.console.print(row)

    @property
    def exit_code(self) -> int:
        """1 when something failed, else 0."""
        return 1 if self.counts["fail"] else 0

    def close(self, good: str, bad: str) -> int:
        """Print the closing sentence and return the exit code."""
        warnings = f"{self.counts['warn']} warning{'' if self.counts['warn'] == 1 else 's'}"
        failures = f"{self.counts['fail']} failure{'' if self.counts['fail'] == 1 else 's'}"
        self.console.print(
            Text(f"{bad}: {failures}, {warnings}.", style="bold red")
            if self.exit_code
            else Text(f"{good}, {warnings}.", style="bold green")
        )
        return self.exit_code
