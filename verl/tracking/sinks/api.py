"""The contract of trackers. Each tracker has a file in this folder; `SINKS` has the names for `trainer.logger`."""

import contextlib
import importlib.util
import logging
import queue
import re
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from verl.errors import ConfigError, MissingExtraError
from verl.families import SINKS
from verl.regular_files import read_text
from verl.tracking.files import Row, write_atomically


@dataclass(frozen=True)
class RunInfo:
    """Facts about the run for a tracker. `config` may be nested: {"trainer": {"save_freq": 20}}."""

    root: Path
    project: str
    experiment: str
    config: Row = field(default_factory=dict)


class Sink:
    """One tracker. The constructor takes a RunInfo, uses neither disk nor network, and raises MissingExtraError without
    `package` (the extra `extra` of verl installs it). All other calls come in order from one thread, and may raise or hang (see
    `Guard`).

    If the package has an object with `log(metrics, step=)` and `finish()`, the tracker defines only `start`, and sets `run`
    there."""

    package = extra = ""

    def __init__(self, info: RunInfo):
        if self.package and importlib.util.find_spec(self.package) is None:
            raise MissingExtraError(f"The tracker '{self.package}' (trainer.logger)", self.extra, self.package)
        self.info = info
        self.run: Any = None

    def start(self) -> None:
        """Connect, open files."""

    def run_id(self) -> str:
        """The tracker's id of this run, for a run that is resumed. It lies in the run folder, so that two folders with equal
        names are two runs."""
        file = self.info.root / f"{self.package}_run_id"
        with contextlib.suppress(OSError, ValueError):
            if re.fullmatch(r"[\w-]{1,64}", run_id := read_text(file).strip()):
                return run_id
        write_atomically(file, uuid.uuid4().hex[:8])
        return read_text(file)

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
    return cast("Sink", SINKS.get(name)(info))


def supported() -> list[str]:
    """The built-in trackers that `make_sink` makes."""
    return [name for name in SINKS.built_in if SINKS.declared(name) is not not_supported]


def not_supported(info: RunInfo) -> Sink:
    """Placeholder for trackers that existing scripts name and this version lacks; `make_sink` raises ConfigError."""
    raise NotImplementedError


log = logging.getLogger(__name__)

_MAX_WAITING = 1000  # calls; a tracker this far behind counts as dead
_CLOSE_TIMEOUT_S = 30.0


class Guard:
    """Calls `sink` from its own thread; every method returns at once, and `close` within `close_timeout_s`.

    The first failure disables the tracker until the end of the run, with a warning.
    """

    def __init__(
        self, name: str, sink: Sink, *, max_waiting: int = _MAX_WAITING, close_timeout_s: float = _CLOSE_TIMEOUT_S
    ):
        self.name = name
        self.disabled = False
        self._sink = sink
        self._close_timeout_s = close_timeout_s
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(max_waiting)
        # a daemon: a tracker that hangs must not keep the process alive
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()
        self._enqueue(sink.start)

    def log(self, metrics: dict[str, float], step: int) -> None:
        """See Sink."""
        self._enqueue(lambda: self._sink.log(metrics, step))

    def table(self, name: str, rows: list[dict[str, object]], step: int) -> None:
        """See Sink."""
        self._enqueue(lambda: self._sink.table(name, rows, step))

    def close(self) -> None:
        """Wait for queued calls until the deadline, then abandon the tracker."""
        self._enqueue(self._sink.close)
        self._enqueue(None)
        self._thread.join(self._close_timeout_s)
        if self._thread.is_alive() and not self.disabled:
            self._disable(f"it had not finished {self._close_timeout_s:g} s after the run ended")

    def _enqueue(self, call: Callable[[], None] | None) -> None:
        if self.disabled:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._disable(f"it is {self._calls.maxsize} calls behind and may hang")

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException as error:  # noqa: BLE001 - a tracker may raise anything, SystemExit too
                self._disable(f"{type(error).__name__}: {error}")
                return
            if self.disabled:
                return

    def _disable(self, reason: str) -> None:
        self.disabled = True
        log.warning("The tracker '%s' is disabled for the rest of the run: %s", self.name, reason)
