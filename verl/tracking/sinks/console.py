"""Metrics as one line on the terminal."""

from rich.console import Console

from verl.tracking.sinks.api import Sink


class ConsoleSink(Sink):
    """Prints `step:3 - loss:0.25 - ...`, the line that log parsers of existing scripts expect."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        parts = [f"step:{step}", *(f"{name}:{value}" for name, value in metrics.items())]
        Console().print(" - ".join(parts), soft_wrap=True, markup=False, highlight=False)
