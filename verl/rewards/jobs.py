"""Queue of calls for the worker threads; a worker without a process waits until the others fall behind."""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from verl.data_proto.samples import Score, ScoreRequest
from verl.errors import RewardError

GROW_AFTER_S = 0.2  # a job that has waited this long is worth starting another process for


@dataclass
class Job:
    """One call of the reward function: one request, or a whole batch for a batched function."""

    id: str  # cannot be guessed; the answer repeats it
    requests: list[ScoreRequest]
    message: bytes  # the encoded call
    future: Future[list[Score]] = field(default_factory=Future)
    submitted_s: float = field(default_factory=time.monotonic)


class JobQueue:
    """First-in, first-out queue. A warm taker gets a job at once; a cold one, which would have to start a process, only
    a job that has waited GROW_AFTER_S."""

    def __init__(self) -> None:
        lock = threading.Lock()
        self._warm = threading.Condition(lock)
        self._cold = threading.Condition(lock)
        self._lock = lock
        self._jobs: deque[Job] = deque()
        self._closed = False

    def put(self, job: Job) -> None:
        """Raises RewardError once the queue is closed."""
        with self._lock:
            if self._closed:
                raise RewardError("The reward workers are closed already; no sample can be scored any more.")
            self._jobs.append(job)
            self._warm.notify()
            if len(self._jobs) == 1:
                self._cold.notify_all()

    def take(self, *, warm: bool, timeout_s: float) -> Job | None:
        """The next job; None after `timeout_s` without one and once the queue is closed."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while not self._closed:
                now = time.monotonic()
                ready_at = now if warm else self._jobs[0].submitted_s + GROW_AFTER_S if self._jobs else deadline
                if self._jobs and ready_at <= now:
                    return self._jobs.popleft()
                if now >= deadline:
                    return None
                (self._warm if warm else self._cold).wait(min(ready_at, deadline) - now if not warm else deadline - now)
            return None

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> list[Job]:
        """Wake every taker with None; returns the jobs left in the queue."""
        with self._lock:
            self._closed = True
            left = list(self._jobs)
            self._jobs.clear()
            self._warm.notify_all()
            self._cold.notify_all()
        return left
