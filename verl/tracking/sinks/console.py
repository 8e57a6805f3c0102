"""Metrics as one line on the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from verl.tracking.sinks.api import RunInfo


class ConsoleSink:
    """`step:3 - loss:0.25 - ...`, the line that log readers of existing scripts look for."""

    def __init__(self, info: RunInfo):
        self.console = Console()

    def start(self) -> None:
        """Nothing to open."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        parts = [f"step:{step}", *(f"{name}:{value}" for name, value in metrics.items())]
        self.console.print(" - ".join(parts), soft_wrap=True, markup=False, highlight=False)

    def table(self, name: str, rows: list[dict[str, Any]], step: int) -> None:
        """Samples lie in the run folder; a terminal is no place for them."""

    def close(self) -> None:
        """Nothing to close."""
