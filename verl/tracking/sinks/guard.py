"""Isolation of the run from a tracker: a tracker that raises, hangs or dies loses only its own data, with one warning."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from verl.tracking.sinks.api import Sink

log = logging.getLogger(__name__)

_MAX_WAITING = 1000  # calls; a tracker this far behind counts as dead
_CLOSE_TIMEOUT_S = 30.0


class Guard:
    """Calls `sink` from its own thread; every method returns at once, and `close` within `close_timeout_s`.

    The first failure disables the tracker for the rest of the run, with a warning.
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
