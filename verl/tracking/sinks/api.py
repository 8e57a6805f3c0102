"""The contract of trackers. One file per tracker beside this one; `SINKS` has the names for `trainer.logger`."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.errors import ConfigError, MissingExtraError
from verl.registry import Registry

SINKS = Registry(
    "tracker",
    {
        "console": "verl.tracking.sinks.console:ConsoleSink",
        "file": "verl.tracking.sinks.file:FileSink",
        "tensorboard": "verl.tracking.sinks.tensorboard:TensorBoardSink",
        "wandb": "verl.tracking.sinks.wandb:WandbSink",
        "mlflow": "verl.tracking.sinks.mlflow:MlflowSink",
        "swanlab": "verl.tracking.sinks.swanlab:SwanlabSink",
        "trackio": "verl.tracking.sinks.trackio:TrackioSink",
        "clearml": "verl.tracking.sinks.api:not_supported",
        "vemlp_wandb": "verl.tracking.sinks.api:not_supported",
        "rl_insight": "verl.tracking.sinks.api:not_supported",
    },
)


@dataclass(frozen=True)
class RunInfo:
    """Facts about the run for a tracker. `config` may be nested: {"trainer": {"save_freq": 20}}."""

    root: Path
    project: str
    experiment: str
    config: dict[str, Any] = field(default_factory=dict)


class Sink:
    """One tracker. The constructor takes a RunInfo, uses neither disk nor network, and raises MissingExtraError when its
    package is not installed. All other calls come in order from one thread, and may raise or hang (see `Guard`)."""

    def start(self) -> None:
        """Connect, open files."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Record the metrics of one step."""
        raise NotImplementedError

    def table(self, name: str, rows: list[dict[str, Any]], step: int) -> None:
        """Record some samples for display; a tracker without tables ignores them."""

    def close(self) -> None:
        """Send all that is queued."""


def make_sink(name: str, info: RunInfo) -> Sink:
    """The tracker `name`; raises ConfigError for an unknown one and MissingExtraError for one that is not installed."""
    if SINKS.get(name) is not_supported:
        raise ConfigError(
            f"The tracker {name!r} is not supported yet. Take it out of trainer.logger; console, file, tensorboard, wandb, "
            "mlflow, swanlab and trackio are supported."
        )
    return SINKS.get(name)(info)


def require_package(tracker: str, package: str, extra: str) -> None:
    """Raises MissingExtraError when `package` cannot be imported."""
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(f"The tracker '{tracker}' (trainer.logger)", extra, package)


def not_supported(info: RunInfo) -> Sink:
    """Placeholder for trackers that existing scripts name and this version lacks; `make_sink` raises ConfigError."""
    raise NotImplementedError
