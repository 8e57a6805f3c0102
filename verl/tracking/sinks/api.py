"""The contract of trackers. Each tracker has a file in this folder; `SINKS` has the names for `trainer.logger`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.errors import ConfigError, MissingExtraError
from verl.families import SINKS


@dataclass(frozen=True)
class RunInfo:
    """Facts about the run for a tracker. `config` may be nested: {"trainer": {"save_freq": 20}}."""

    root: Path
    project: str
    experiment: str
    config: dict[str, Any] = field(default_factory=dict)


class Sink:
    """One tracker. The constructor takes a RunInfo, uses neither disk nor network, and raises MissingExtraError when `package`,
    which the extra `extra` of verl installs, is missing. All other calls come in order from one thread, and may raise or hang
    (see `Guard`).

    A tracker whose package has an object with `log(metrics, step=)` and `finish()` defines only `start`, which sets `run`."""

    package = extra = ""

    def __init__(self, info: RunInfo):
        if self.package and importlib.util.find_spec(self.package) is None:
            raise MissingExtraError(f"The tracker '{self.package}' (trainer.logger)", self.extra, self.package)
        self.info = info
        self.run: Any = None

    def start(self) -> None:
        """Connect, open files."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Record the metrics of one step."""
        self.run.log(metrics, step=step)

    def table(self, name: str, rows: list[dict[str, object]], step: int) -> None:
        """Record some samples for display; a tracker without tables ignores them."""

    def close(self) -> None:
        """Send all that is queued."""
        if self.run is not None:
            self.run.finish()


def columns_and_cells(rows: Sequence[Mapping[str, object]]) -> tuple[list[Any], list[list[Any]]]:
    """The columns of samples and their values by rows, for a table: numbers, texts and None."""
    cells = [[v if isinstance(v, int | float | str) or v is None else str(v) for v in row.values()] for row in rows]
    return list(rows[0]) if rows else [], cells


def make_sink(name: str, info: RunInfo) -> Sink:
    """The tracker `name`; raises ConfigError for an unknown name and MissingExtraError when its package is not installed."""
    if SINKS.get(name) is not_supported:
        raise ConfigError(
            f"The tracker {name!r} is not supported yet. Take it out of trainer.logger; {', '.join(supported())} are supported."
        )
    return SINKS.get(name)(info)


def supported() -> list[str]:
    """The built-in trackers that `make_sink` makes."""
    return [name for name in SINKS.built_in if SINKS.declared(name) is not not_supported]


def not_supported(info: RunInfo) -> Sink:
    """Placeholder for trackers that existing scripts name and this version lacks; `make_sink` raises ConfigError."""
    raise NotImplementedError
