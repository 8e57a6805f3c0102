"""Requests in the order in which they are computed, and their answers.

Requests of one model run strictly by `seq_id`; one that comes early waits for those before it. Models and samplers take turns.
A repeated request gets the first one's future, so nothing is computed twice.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from verl.tinker.records import RefusedRequest

_GATHER_S, _MOST_GATHER_S = 0.02, 0.3  # how long a batch of samples waits for the next request, and for all


@dataclass(frozen=True)
class WireAnswer:
    """A result as it is sent."""

    body: bytes
    media_type: str = "application/json"


class RequestFuture:
    """The result of a request, when there is one. Made and awaited on the event loop, set from any thread."""

    def __init__(self, request_id: str, digest: str):
        self.request_id, self.digest = request_id, digest
        self.answer: WireAnswer | None = None
        self.done_at = 0.0
        self._loop, self._event = asyncio.get_running_loop(), asyncio.Event()

    def set(self, answer: WireAnswer) -> None:
        """Give the result."""
        self.answer, self.done_at = answer, time.monotonic()
        self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, timeout_s: float) -> WireAnswer | None:
        """The result, or None after `timeout_s` seconds."""
        try:
            await asyncio.wait_for(self._event.wait(), timeout_s)
        except asyncio.TimeoutError:
            return None
        return self.answer


@dataclass
class QueuedJob:
    """A request that waits to be computed; `work` is what a lane's worker reads."""

    future: RequestFuture
    work: Any


class Lanes:
    """Jobs in lanes that take turns. A lane of samples gives all its jobs at once, another lane one."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[Hashable, deque[QueuedJob]] = OrderedDict()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, lane: Hashable, job: QueuedJob) -> None:
        """Append a job to a lane."""
        with self._changed:
            self._jobs.setdefault(lane, deque()).append(job)
            self._changed.notify()

    def take(self, is_batch: Callable[[Hashable], bool]) -> tuple[Hashable, list[QueuedJob]] | None:
        """The next lane with its jobs; waits for one. None once closed."""
        with self._changed:
            while not self._jobs and not self._closed:
                self._changed.wait(1.0)
            if self._closed:
                return None
            lane = next(iter(self._jobs))
            if not is_batch(lane):
                jobs = self._jobs.pop(lane)
                job = jobs.popleft()
                if jobs:
                    self._jobs[lane] = jobs  # behind the others
                return lane, [job]
        self._gather(lane)
        with self._changed:
            return lane, list(self._jobs.pop(lane))

    def close(self) -> None:
        """End `take`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _gather(self, lane: Hashable) -> None:
        """Wait while jobs of `lane` keep coming: a client posts its samples one by one."""
        until, count = time.monotonic() + _MOST_GATHER_S, 0
        while count < len(self._jobs[lane]) and time.monotonic() < until:
            count = len(self._jobs[lane])
            time.sleep(_GATHER_S)


@dataclass
class Ordered:
    """The requests of one model by seq_id. A number whose request was refused counts as used."""

    next_seq: int = 1
    futures: dict[int, RequestFuture] = field(default_factory=dict)
    _waiting: dict[int, QueuedJob | None] = field(default_factory=dict)

    def known(self, seq_id: int, digest: str) -> RequestFuture | None:
        """The future of a request that came before. Raises RefusedRequest for another request under its number."""
        future = self.futures.get(seq_id)
        if future is not None and future.digest != digest:
            raise RefusedRequest(f"seq_id {seq_id} belongs to another request of this model.")
        if future is None and (seq_id < self.next_seq or seq_id in self._waiting):
            raise RefusedRequest(f"seq_id {seq_id} was used by an earlier request of this model.")
        return future

    def add(self, seq_id: int, job: QueuedJob | None) -> list[QueuedJob]:
        """Take a request, None for one that was refused; returns the jobs that can run now, in order."""
        self._waiting[seq_id] = job
        if job is not None:
            self.futures[seq_id] = job.future
        released: list[QueuedJob] = []
        while self.next_seq in self._waiting:
            released += filter(None, [self._waiting.pop(self.next_seq)])
            self.next_seq += 1
        return released
