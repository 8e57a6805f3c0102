"""Trackers, timers and log files of scripts: `verl.utils.tracking`, `verl.utils.debug`, `verl.utils.logger`,
`verl.utils.rollout_trace`, `verl.trainer.logger`."""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from verl.config.secrets import hide_values
from verl.errors import ConfigError
from verl.tracking.logs import add_handler, add_log_file, remove_handler
from verl.tracking.sinks.api import Guard, RunInfo, make_sink

F = TypeVar("F", bound=Callable[..., object])

_followers: list[Callable[[dict[str, Any], int], None]] = []  # get all metrics of this process's trackers
_open: dict[str, Guard] = {}  # the newest tracker of each name in this process


class Tracking:
    """Metrics to the named trackers. A tracker that fails is switched off; the caller does not notice."""

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: str | list[str] = "console",
        config: Mapping[str, object] | None = None,
    ):
        names = [default_backend] if isinstance(default_backend, str) else list(default_backend)
        if _followers:  # the run folder has the metrics
            names = [name for name in names if name != "file"]
        info = RunInfo(Path.cwd(), project_name, experiment_name, hide_values(dict(config or {})))
        self.logger = {name: Guard(name, sink) for name, sink in [(n, make_sink(n, info)) for n in names]}
        _open.update(self.logger)
        atexit.register(self.close)  # scripts rarely close it, and queued metrics would be lost

    def log(self, data: Mapping[str, Any], step: int, backend: str | list[str] | None = None) -> None:
        """Send `data` to all trackers, or to those named."""
        backends = [backend] if isinstance(backend, str) else backend
        for follow in _followers:
            follow(dict(data), step)
        for name, guard in self.logger.items():
            if backends is None or name in backends:
                guard.log(dict(data), step)

    def close(self) -> None:
        """Wait until the trackers have sent everything."""
        guards, self.logger = self.logger, {}
        for name, guard in guards.items():
            if _open.get(name) is guard:
                del _open[name]
            guard.close()

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def local_logger(print_to_console: bool = True) -> Tracking:
    """A tracker of the line of a step on the terminal, or of nothing."""
    return Tracking("verl", "verl", ["console"] if print_to_console else [])


@contextmanager
def followed_by(follow: Callable[[dict[str, object], int], None]) -> Iterator[None]:
    """A block in which `follow(metrics, step)` is called with the metrics of each Tracking, and its file is left out."""
    _followers.append(follow)
    try:
        yield
    finally:
        _followers.remove(follow)


class ValidationGenerationsLogger:
    """Validation samples as a table in the named trackers: the trackers that this process opened last, else new ones."""

    def __init__(self, project_name: str | None = None, experiment_name: str | None = None):
        self.project_name = project_name or "verl"
        self.experiment_name = experiment_name or "validation"
        self._own: list[Tracking] = []

    def log(self, loggers: str | Sequence[str], samples: Sequence[Sequence[object]], step: int) -> None:
        """`samples` are [input, output, score] or [input, output, ground truth, score]."""
        names = [loggers] if isinstance(loggers, str) else list(loggers)
        missing = [name for name in names if name not in _open]
        if missing:
            self._own.append(Tracking(self.project_name, self.experiment_name, missing))
        for name in names:
            _open[name].table("val/generations", [_columns(sample) for sample in samples], step)


def _columns(sample: Sequence[object]) -> dict[str, object]:
    names = ("input", "output", "score") if len(sample) == 3 else ("input", "output", "ground_truth", "score")
    return dict(zip(names, sample, strict=True))


class RLLogger(logging.LoggerAdapter):  # type: ignore[type-arg]  # generic only since Python 3.11
    """Logger `verl` that also writes this process's log to the rotating `log_dir`/rank_{rank}.log, or to `handler`, until
    `close`. `rank` defaults to the environment's RANK."""

    def __init__(self, log_dir: str | Path = "./logs", rank: int | None = None, handler: logging.Handler | None = None):
        super().__init__(logging.getLogger("verl"), {})
        if handler is not None:
            self._handler = add_handler(handler)
            return
        folder = Path(log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._handler = add_log_file(folder, int(os.environ.get("RANK", "0")) if rank is None else rank)

    def close(self) -> None:
        remove_handler(self._handler)


@contextmanager
def marked_timer(
    name: str,
    timing_raw: MutableMapping[str, float],
    color: str | None = None,
    domain: str | None = None,
    category: str | None = None,
) -> Iterator[None]:
    """Add the seconds of the block to `timing_raw[name]`. The other arguments describe marks of NVIDIA's profilers and
    have no effect: a run writes its spans to the timeline in its run folder."""
    start = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - start


simple_timer = marked_timer


class RolloutTraceConfig:
    """Settings of rollout tracing, without a backend: the run folder's ledger has every sample."""

    @classmethod
    def init(cls, project_name: str, experiment_name: str, backend: str | None, *_: object, **__: object) -> None:
        """Raises ConfigError for a backend other than None."""
        if backend is not None:
            raise ConfigError(
                f"Tracing rollouts to {backend!r} is not available in this version. Set rollout.trace.backend=null; "
                "`verl show RUN` reads the samples of a run from its ledger."
            )

    @classmethod
    def get_backend(cls) -> None:
        """None: there is no tracing backend."""


def rollout_trace_op(func: F) -> F:
    """`func` unchanged. Other releases report its calls to Weave or MLflow."""
    return func


@contextmanager
def rollout_trace_attr(**_: object) -> Iterator[None]:
    """A block with attributes that other releases attach to traced calls; no effect here."""
    yield
