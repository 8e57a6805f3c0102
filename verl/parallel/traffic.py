"""Seconds and bytes of this process's data exchange with other processes."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Exchanged:
    seconds: float = 0.0  # the wait for other processes included
    num_bytes: int = 0


@dataclass(frozen=True)
class Gathers:
    """All-gathers of sharded parameters."""

    seconds: float = 0.0
    count: int = 0

    @property
    def mean_ms(self) -> float:
        return 1e3 * self.seconds / self.count if self.count else 0.0


class Traffic:
    """A counter that any thread may add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = 0.0
        self._num_bytes = 0
        self._gathers = Gathers()

    def add(self, seconds: float, num_bytes: int) -> None:
        with self._lock:
            self._seconds += seconds
            self._num_bytes += num_bytes

    def add_gather(self, seconds: float, num_bytes: int) -> None:
        """As `add`, for an all-gather of parameters."""
        self.add(seconds, num_bytes)
        with self._lock:
            self._gathers = Gathers(self._gathers.seconds + seconds, self._gathers.count + 1)

    def take_gathers(self) -> Gathers:
        """The all-gathers since the last call of this method."""
        with self._lock:
            gathers, self._gathers = self._gathers, Gathers()
        return gathers

    @contextmanager
    def exchanging(self, num_bytes: int) -> Iterator[None]:
        """Counts the time of the `with` block."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(time.perf_counter() - began, num_bytes)

    def take(self) -> Exchanged:
        """The sums since the last call."""
        with self._lock:
            exchanged = Exchanged(self._seconds, self._num_bytes)
            self._seconds, self._num_bytes = 0.0, 0
        return exchanged


TRAFFIC = Traffic()  # of this process: collectives and weight transfers report here
