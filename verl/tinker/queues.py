"""Requests in the order of their computation, and their answers.

Requests of one model run strictly by `seq_id`; an early request waits for the requests before it. Models and samplers take
turns. A repeated request gets the first one's future, so nothing is computed twice.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pydantic

from verl.tinker.records import RefusedRequest

SLICE_TOKENS = 8192  # of training between two looks at who is next
_SHORTEST = 256  # tokens of a sample, for all lower limits
TURN_TOKENS = 256  # of sampling between two such looks
_MOST_AHEAD = 1 << 16  # numbers between a request and the next one in order


@dataclass(frozen=True)
class WireAnswer:
    """A result as it is sent."""

    body: bytes
    media_type: str = "application/json"

    @classmethod
    def of(cls, message: pydantic.BaseModel) -> WireAnswer:
        return cls(message.model_dump_json(exclude_none=True).encode())

    @property
    def failure(self) -> str | None:
        """The reason of a failed request; None for a result."""
        return str(json.loads(self.body)["error"]) if self.body.startswith(b'{"error"') else None


class RequestFuture:
    """The result of a request of a model or a sampler, its `owner`, when there is one. Made and awaited on the event loop, set
    from any thread."""

    def __init__(self, request_id: str, digest: str, owner: str, tenant: str, tokens: int):
        self.request_id, self.digest, self.owner, self.tenant, self.tokens = request_id, digest, owner, tenant, tokens
        self.answer: WireAnswer | None = None
        self.place = -1  # of the process that samples for it
        self.is_gone = False  # its client, who cannot come back: it is not computed to its end
        self.ends = False  # the server, and waits with it
        self.done_at = 0.0
        self._loop, self._event = asyncio.get_running_loop(), asyncio.Event()

    def set(self, answer: WireAnswer) -> None:
        self.answer, self.done_at = answer, time.monotonic()
        self._loop.call_soon_threadsafe(self._event.set)

    def wake(self) -> None:
        """Let waits end without an answer: the server ends."""
        self.ends = True
        self._event.set()

    async def wait(self, timeout_s: float) -> WireAnswer | None:
        try:
            await asyncio.wait_for(self._event.wait(), timeout_s)
        except asyncio.TimeoutError:
            return None
        return self.answer


@dataclass
class QueuedJob:
    """A request that waits to be computed; `work` is what a lane's worker reads, `cost` the tokens of its next slice, or of all
    its samples. `number` is that of a sample request in the open lane that computes it."""

    future: RequestFuture
    work: Any
    tenant: str
    cost: int = 1
    number: int | None = None


class SampleLane(NamedTuple):
    """Samples of a base model with equal rules and at most `longest` tokens, which decode together. A request that must not
    fail others is `alone`."""

    base: Any
    params: Hashable
    longest: int
    alone: str = ""

    @classmethod
    def of(cls, base: Hashable, params: Hashable, max_tokens: int) -> SampleLane:
        """The lane of requests up to this limit; larger limits share a lane up to four times as many tokens."""
        longest = _SHORTEST
        while longest < max_tokens:
            longest *= 4
        return cls(base, params, longest)


@dataclass
class _Share:
    """The jobs of a tenant in lanes, and the tokens that were computed for it; an idle time adds what it missed."""

    lanes: OrderedDict[Hashable, deque[QueuedJob]] = field(default_factory=OrderedDict)
    used: int = 0


class Lanes:
    """Jobs of tenants in lanes. The tenant with the fewest tokens is next (start-time fair queueing, Goyal et al., 1996),
    so a small request waits for one turn of a large one. The lanes of a tenant take turns. A lane of samples gives the jobs
    of all tenants, another lane one."""

    def __init__(self) -> None:
        self._shares: OrderedDict[str, _Share] = OrderedDict()
        self._used = 0  # by the tenant of the last turn when it began
        self._changed = threading.Condition()
        self._closed = False

    def put(self, lane: Hashable, job: QueuedJob, *, first: bool = False) -> None:
        """Append a job to a lane, or put it `first` there."""
        with self._changed:
            share = self._shares.setdefault(job.tenant, _Share())
            if not share.lanes:
                share.used = max(share.used, self._used)
            jobs = share.lanes.setdefault(lane, deque())
            jobs.appendleft(job) if first else jobs.append(job)
            self._changed.notify()

    def take(self) -> tuple[Hashable, list[QueuedJob]] | None:
        """The next lane with its jobs; waits for one. None once closed."""
        with self._changed:
            while not self._closed and not any(share.lanes for share in self._shares.values()):
                self._changed.wait(1.0)
            if self._closed:
                return None
            tenant = self._next_tenant()
            lane = next(iter(self._shares[tenant].lanes))
            if isinstance(lane, SampleLane):
                names = [tenant, *(name for name in self._shares if name != tenant)]
                return lane, [job for name in names for job in self._shares[name].lanes.pop(lane, ())]
            jobs = self._shares[tenant].lanes.pop(lane)
            job = jobs.popleft()
            if jobs:  # behind the tenant's lanes
                self._shares[tenant].lanes[lane] = jobs
            self._charge(tenant, job.cost)
            return lane, [job]

    def charge(self, tenant: str, tokens: int) -> None:
        """Count the tokens of samples."""
        with self._changed:
            self._charge(tenant, tokens)

    def _charge(self, tenant: str, tokens: int) -> None:
        self._shares.setdefault(tenant, _Share()).used += tokens

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _next_tenant(self) -> str:
        """The tenant that waits with the fewest tokens; of equal ones, the one whose turn is longest ago."""
        self._shares = OrderedDict(
            (n, share) for n, share in self._shares.items() if share.lanes or share.used > self._used
        )
        tenant = min((n for n, share in self._shares.items() if share.lanes), key=lambda n: self._shares[n].used)
        self._used = self._shares[tenant].used
        self._shares.move_to_end(tenant)
        return tenant


@dataclass
class Ordered:
    """The requests of one model by seq_id. The number of a refused request counts as used. `moved_at` is the time when the
    last one came, monotonic."""

    next_seq: int = 1
    moved_at: float = field(default_factory=time.monotonic)
    _waiting: dict[int, QueuedJob | None] = field(default_factory=dict)

    @property
    def missing(self) -> str:
        """The reason why requests wait that have come early; "" if there are none."""
        return (
            f"Request {self.next_seq} of this model has not come, and later ones wait for it." if self._waiting else ""
        )

    def holes(self) -> list[int]:
        """The numbers that requests wait for."""
        return [n for n in range(self.next_seq, max(self._waiting, default=0)) if n not in self._waiting]

    def waiting(self) -> list[QueuedJob]:
        return [job for job in self._waiting.values() if job is not None]

    def require_free(self, seq_id: int | None) -> int:
        """The number. Raises RefusedRequest for a used number, and for none."""
        if seq_id is None or seq_id < 1:
            raise RefusedRequest("A request of a model needs a seq_id from 1 on.")
        if seq_id < self.next_seq or seq_id in self._waiting:
            raise RefusedRequest(f"seq_id {seq_id} was used by an earlier request of this model, or came too late.")
        if seq_id >= self.next_seq + _MOST_AHEAD:
            raise RefusedRequest(f"seq_id {seq_id} is too far ahead; the next of this model is {self.next_seq}.")
        return seq_id

    def add(self, seq_id: int, job: QueuedJob | None) -> list[QueuedJob]:
        """Take a request, None if it was refused; returns the jobs that can run now, in order."""
        self._waiting[seq_id], self.moved_at = job, time.monotonic()
        released: list[QueuedJob] = []
        while self.next_seq in self._waiting:
            released += filter(None, [self._waiting.pop(self.next_seq)])
            self.next_seq += 1
        return released
