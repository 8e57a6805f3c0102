"""The state of the service: sessions, models, samplers, futures; and the thread that computes.

Requests come on the event loop, which checks them and queues jobs. One thread takes the jobs; only it reads adapters and calls
the workbench. A forward_backward that fails takes the optimizer step after it with it, so that no half batch trains.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from verl.engines.adapters import Adapter, AdapterWeights
from verl.errors import VerlError
from verl.tinker.checkpoints import Checkpoints
from verl.tinker.codec import sample_result
from verl.tinker.queues import Lanes, Ordered, QueuedJob, RequestFuture, WireAnswer
from verl.tinker.records import RefusedRequest, SamplingRequest
from verl.tinker.workbench import Workbench

log = logging.getLogger(__name__)

Key = TypeVar("Key")

PROTOBUF = "application/x-protobuf"
KEEP_ANSWERS_S = 900.0  # after an answer is there
SESSION_S = 1800.0  # without a heartbeat
_CLOSE_S = 60.0


@dataclass
class ServedModel:
    """An adapter that trains. `failed` says why a forward_backward since the last optimizer step has failed."""

    model_id: str
    session_id: str
    base_model: str
    rank: int
    adapter: Adapter | None = None
    failed: str = ""
    last_request: float = field(default_factory=time.time)
    order: Ordered = field(default_factory=Ordered)

    def trained(self) -> Adapter:
        """The adapter. Raises RefusedRequest where creating it has failed."""
        if self.adapter is None:
            raise RefusedRequest(f"The model {self.model_id} was not created, so it cannot be used.", 404)
        return self.adapter


@dataclass(frozen=True)
class ServedSampler:
    """A sampling session: weights that never change (None: the base model), and the address that they came from."""

    sampler_id: str
    session_id: str
    base_model: str
    weights: AdapterWeights | None
    model_path: str | None = None


class SampleLane(NamedTuple):
    """Samples of equal weights and rules, which are computed in one batch."""

    weights: int  # id() of AdapterWeights, which the jobs hold
    params: Hashable


class Service:
    """Everything behind the routes. Made on the event loop; `close` ends its thread."""

    def __init__(self, bench: Workbench, checkpoints: Checkpoints, names: list[str]):
        self.bench, self.checkpoints, self.names = bench, checkpoints, names
        self.sessions: dict[str, float] = {}  # time of the last sign of life, monotonic
        self.models: dict[str, ServedModel] = {}
        self.samplers: dict[str, ServedSampler] = {}
        self.futures: dict[str, RequestFuture] = {}
        self._lanes = Lanes()
        self._thread = threading.Thread(target=self._compute, name="tinker-compute", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End after the job that is computed now."""
        self._lanes.close()
        self._thread.join(_CLOSE_S)

    # -- called on the event loop -----------------------------------------------------------------------------------------

    def new_session(self) -> str:
        session_id = str(uuid.uuid4())
        self.sessions[session_id] = time.monotonic()
        return session_id

    def touch(self, session_id: str) -> None:
        """Note that a session lives. Raises RefusedRequest (410) for one that does not."""
        if session_id not in self.sessions:
            raise RefusedRequest(f"The session {session_id[:80]!r} has ended or never existed. Create a new one.", 410)
        self.sessions[session_id] = time.monotonic()

    def finish(self, session_id: str) -> None:
        """Forget a session with its models and samplers; checkpoints stay."""
        self.sessions.pop(session_id, None)
        self.models = {n: model for n, model in self.models.items() if model.session_id != session_id}
        self.samplers = {n: sampler for n, sampler in self.samplers.items() if sampler.session_id != session_id}

    def sweep(self) -> None:
        """Forget sessions that no heartbeat comes from, and answers that were there for long."""
        now = time.monotonic()
        for session_id in [s for s, last in self.sessions.items() if now - last > SESSION_S]:
            log.info("The session %s has ended without a word; its unsaved models are gone.", session_id)
            self.finish(session_id)
        self.futures = _recent(self.futures, now)
        for model in self.models.values():
            model.order.futures = _recent(model.order.futures, now)

    def model(self, model_id: str) -> ServedModel:
        model = self.models.get(model_id)
        if model is None:
            raise RefusedRequest(f"There is no model {model_id[:200]!r}. Its session may have ended.", 404)
        model.last_request = time.time()
        return model

    def base_model(self, name: str | None) -> str:
        """The name of a base model. Raises RefusedRequest for a model that is not served."""
        if name is None or name not in self.names:
            raise RefusedRequest(f"There is no base model {str(name)[:200]!r} here; there is {', '.join(self.names)}.")
        return name

    def sampler(self, sampler_id: str) -> ServedSampler:
        sampler = self.samplers.get(sampler_id)
        if sampler is None:
            raise RefusedRequest(f"There is no sampling session {sampler_id[:200]!r}.", 404)
        return sampler

    def add_model(self, model: ServedModel, digest: str, make: Callable[[], Adapter], answer: Any) -> RequestFuture:
        """Create a model, whose adapter `make` gives on the computing thread."""
        future, is_new = self._future(f"{model.model_id}/create", digest)
        if is_new:
            self.models[model.model_id] = model

            def create() -> WireAnswer:
                model.adapter = make()
                return WireAnswer(answer.model_dump_json().encode())

            self._lanes.put(model.model_id, QueuedJob(future, create))
        return future

    def queue(
        self, model: ServedModel, seq_id: int | None, digest: str, prepare: Callable[[], Callable[[], WireAnswer]]
    ) -> RequestFuture:
        """Queue a request of a model under its number. `prepare` checks it, and returns what to compute; when it raises, the
        number is used all the same."""
        if seq_id is None or seq_id < 1:
            raise RefusedRequest("A request of a model needs a seq_id from 1 on.")
        known = model.order.known(seq_id, digest)
        if known is not None:
            return known
        try:
            work = prepare()
        except RefusedRequest:
            self._release(model, seq_id, None)
            raise
        future, _ = self._future(f"{model.model_id}/{seq_id}", digest)
        self._release(model, seq_id, QueuedJob(future, work))
        return future

    def queue_sample(
        self, sampler: ServedSampler, seq_id: int | None, digest: str, request: SamplingRequest
    ) -> RequestFuture:
        """Queue a sample request; a repeated one gets the same future."""
        future, is_new = self._future(f"{sampler.sampler_id}/{seq_id}", digest)
        if is_new:
            lane = SampleLane(id(sampler.weights), request.params)
            self._lanes.put(lane, QueuedJob(future, (sampler.weights, request)))
        return future

    def _release(self, model: ServedModel, seq_id: int, job: QueuedJob | None) -> None:
        for ready in model.order.add(seq_id, job):
            self._lanes.put(model.model_id, ready)

    def _future(self, key: str, digest: str) -> tuple[RequestFuture, bool]:
        request_id = hashlib.sha256(key.encode()).hexdigest()[:32]
        known = self.futures.get(request_id)
        if known is not None:
            if known.digest != digest:
                raise RefusedRequest("This number belongs to another request.")
            return known, False
        self.futures[request_id] = RequestFuture(request_id, digest)
        return self.futures[request_id], True

    # -- the computing thread ---------------------------------------------------------------------------------------------

    def _compute(self) -> None:
        while (taken := self._lanes.take(lambda lane: isinstance(lane, SampleLane))) is not None:
            lane, jobs = taken
            if isinstance(lane, SampleLane):
                self._sample(jobs)
            else:
                jobs[0].future.set(_answered(jobs[0].work))

    def _sample(self, jobs: list[QueuedJob]) -> None:
        """Compute the samples of `jobs`, in batches in which no two have the same random numbers."""
        while jobs:
            batch = list({job.work[1].ordinal: job for job in reversed(jobs)}.values())
            jobs = [job for job in jobs if job not in batch]
            failure = None
            try:
                outputs = self.bench.sample(batch[0].work[0], [job.work[1] for job in batch])
                answers = [WireAnswer(sample_result(output), PROTOBUF) for output in outputs]
            except Exception as error:  # noqa: BLE001  (whatever fails is the answer of its requests)
                failure = _failure(error)
            for number, job in enumerate(batch):
                job.future.set(failure or answers[number])


def _recent(futures: dict[Key, RequestFuture], now: float) -> dict[Key, RequestFuture]:
    """The futures that wait, or have been answered lately."""
    return {key: f for key, f in futures.items() if f.answer is None or now - f.done_at < KEEP_ANSWERS_S}


def _answered(work: Callable[[], WireAnswer]) -> WireAnswer:
    try:
        return work()
    except Exception as error:  # noqa: BLE001  (whatever fails is the answer of its request)
        return _failure(error)


def _failure(error: Exception) -> WireAnswer:
    """The answer of a request that has failed: the sentence, and whether the request or the server is the cause."""
    if isinstance(error, RefusedRequest):
        sentence, category = error.sentence, "user"
    elif isinstance(error, VerlError):
        sentence, category = str(error), "server"
    else:
        log.error("A request has failed.", exc_info=error)
        sentence, category = f"{type(error).__name__} in the server; its log has more.", "server"
    return WireAnswer(json.dumps({"error": sentence, "category": category}).encode())
