"""Ctrl-C and SIGTERM: the first asks for an orderly end between two phases, a second Ctrl-C ends at once."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

log = logging.getLogger(__name__)

_SAME_S = 0.1  # two signals within that time are one Ctrl-C that came by two ways (the terminal's group, and a parent)


class StopRequested(Exception):
    """Raised by `StopSignal.check`; no weight of the step under way has changed yet."""


class StopSignal:
    """While entered, SIGINT and SIGTERM are noted instead of killing the run."""

    def __init__(self) -> None:
        self.requested = False
        self._requested_at = 0.0
        self._previous: dict[int, Any] = {}
        self._any_process: Callable[[bool], bool] = bool

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT and time.monotonic() - self._requested_at > _SAME_S:
            raise KeyboardInterrupt
        if not self.requested:
            self.requested, self._requested_at = True, time.monotonic()
        log.warning("Stopping after this phase and saving; Ctrl-C again stops at once, without saving.")

    def share(self, any_process: Callable[[bool], bool]) -> None:
        """From now on all processes of the run stop at the same `check`, wherever the signal came; `any_process(flag)` says
        whether one of them has it."""
        self._any_process = any_process

    def check(self) -> None:
        """Raise StopRequested if a stop was asked for."""
        if self._any_process(self.requested):
            raise StopRequested
