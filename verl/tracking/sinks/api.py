"""What a tracker is. One file per tracker beside this one; `SINKS` names them as `trainer.logger` does."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

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
    """What a tracker is told about the run. `config` may be nested: {"trainer": {"save_freq": 20}}."""

    root: Path
    project: str
    experiment: str
    config: dict[str, Any] = field(default_factory=dict)


class Sink(Protocol):
    """One tracker. The constructor takes a RunInfo, touches neither disk nor network, and raises MissingExtraError when
    its package is not installed. All other calls come in order from one thread and may raise or hang: a guard stands
    around them (see `Guard`)."""

    def start(self) -> None:
        """Connect, open files."""
        ...

    def log(self, metrics: dict[str, float], step: int) -> None:
        """The metrics of one step."""
        ...

    def table(self, name: str, rows: list[dict[str, Any]], step: int) -> None:
        """Some samples to look at; a tracker without tables leaves them out."""
        ...

    def close(self) -> None:
        """Send what is left."""
        ...


def make_sink(name: str, info: RunInfo) -> Sink:
    """The tracker `name`; raises ConfigError for an unknown one and MissingExtraError for one that is not installed."""
    if SINKS.get(name) is not_supported:
        raise ConfigError(
            f"The tracker {name!r} is not supported yet. Take it out of trainer.logger; console, file, tensorboard, wandb, "
            "mlflow, swanlab and trackio are."
        )
    return SINKS.get(name)(info)


def require_package(tracker: str, package: str, extra: str) -> None:
    """Raises MissingExtraError when `package` cannot be imported."""
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(f"The tracker '{tracker}' (trainer.logger)", extra, package)


def not_supported(info: RunInfo) -> Sink:
    """Stands for trackers that existing scripts may name and this version does not have; `make_sink` says so."""
    raise NotImplementedError
