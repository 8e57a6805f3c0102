"""The state of the service: sessions, models, samplers and futures, for requests that come on the event loop.

Requests are checked, entered in the journal and queued. Threads of `Computer` take them: one, or if processes of their own
train and sample, one for those that train and one for each that samples. After a kill, `recover` takes the requests of the
journal as if they came again.
"""

import contextlib
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from verl.tinker.bases import BaseModel, Bases
from verl.tinker.checkpoints import Checkpoints, SavedAdapter
from verl.tinker.codec import request_number
from verl.tinker.computer import Computer
from verl.tinker.in_work import InWork
from verl.tinker.journal import REFUSED, AcceptedRequest, RequestJournal
from verl.tinker.parked import Parked
from verl.tinker.queues import SLICE_TOKENS, Lanes, QueuedJob, RequestFuture, SampleLane, WireAnswer
from verl.tinker.records import RefusedRequest, SamplingRequest
from verl.tinker.served import (
    ENDPOINT,
    ClientCall,
    ClientSession,
    SampleJob,
    ServedModel,
    ServedSampler,
    Work,
    at_once,
    failing,
    replaced,
)
from verl.tinker.snapshots import Snapshots
from verl.tinker.tenants import Tenant, Tenants

log = logging.getLogger(__name__)

KEEP_ANSWERS_S = 900.0  # after an answer is there
SESSION_S = 1800.0  # without a heartbeat
IDLE_SAMPLER_S, REPLACED_S = 6 * 3600.0, 3600.0  # without a request; of a snapshot that has a newer one
SILENT_S = 120.0  # without a heartbeat, of which the SDK sends one in 10 s: it may end to make room
RETRY_S = 2


class Service:
    """Everything behind the routes. Made on the event loop; `close` ends its threads. When these can compute no more, `lost`
    has the reason, and `on_lost` is called."""

    def __init__(
        self,
        bases: Bases,
        checkpoints: Checkpoints,
        journal: RequestJournal,
        tenants: Tenants | None = None,
    ):
        self.bases, self.checkpoints, self.journal = bases, checkpoints, journal
        self.tenants = tenants or Tenants()
        self.snapshots = Snapshots(checkpoints.root.parent)
        self.sessions: dict[str, ClientSession] = {}
        self.models: dict[str, ServedModel] = {}
        self.samplers: dict[str, ServedSampler] = {}
        self.futures: dict[str, RequestFuture] = {}
        self.arriving: Counter[str] = Counter()  # bodies of tenants
        self.lost: Exception | None = None
        self.on_lost: Callable[[], object] = lambda: None
        self._lanes = Lanes()
        self._sample_lanes = [Lanes() for _ in range(bases.num_samplers)] or [self._lanes]
        self._parked = Parked(self.models, checkpoints, journal)
        bases.tenants_of, bases.on_leave, bases.on_return = self._tenants_of, self._parked.take, self._parked.give
        self.in_work = InWork(checkpoints.root.parent)
        settings = (bases, checkpoints, journal, self.snapshots, self.in_work)
        places = {self._lanes: 0} | {lanes: place for place, lanes in enumerate(self._sample_lanes)}
        self.computers = [Computer(*settings, lanes, self._lose, place) for lanes, place in places.items()]

    def close(self) -> None:
        """End after the slices that are computed now."""
        for computer in self.computers:
            computer.close()
        self.in_work.close()
        self.journal.close()

    def _lose(self, error: Exception) -> None:
        self.lost = self.lost or error
        self.on_lost()

    @property
    def paused(self) -> str:
        """The reason why answers wait; "" while none does."""
        return next((computer.paused for computer in self.computers if computer.paused), "")

    # -- sessions ---------------------------------------------------------------------------------------------------------

    def new_session(self, session_id: str, tenant: Tenant, notes: Mapping[str, Any]) -> None:
        self.sessions[session_id] = ClientSession(tenant, notes=notes)
        self.journal.session(session_id, tenant.name)

    def touch(self, call: ClientCall, session_id: str) -> None:
        """Note that a session lives. Raises RefusedRequest (410) if it does not."""
        session = self.sessions.get(session_id)
        if session is None or not call.tenant.sees(session.tenant.name):
            raise RefusedRequest(f"The session {session_id[:80]!r} has ended or never existed. Create a new one.", 410)
        session.last_sign = time.monotonic()

    def finish(self, session_id: str) -> None:
        """Forget a session with its models and samplers; checkpoints stay."""
        self.sessions.pop(session_id, None)
        self.journal.end_session(session_id)
        for model_id in [n for n, model in self.models.items() if model.session_id == session_id]:
            model = self.models.pop(model_id)
            self._parked.drop(model_id)
            if (bench := self.bases.loaded(model.base)) is not None:
                bench.training.drop(model_id)
            self.checkpoints.drop_states(model_id)
        self._drop_samplers([n for n, sampler in list(self.samplers.items()) if sampler.session_id == session_id])

    def sweep(self) -> None:
        """Forget sessions without a heartbeat, idle samplers, old answers, and checkpoints after their time. A failure is
        logged, and the next parts are done."""
        now = time.monotonic()
        silent = [s for s, session in self.sessions.items() if now - session.last_sign > SESSION_S]
        idle = [n for n, sampler in list(self.samplers.items()) if now - sampler.last_use > IDLE_SAMPLER_S]
        parts: list[Callable[[], None]] = [partial(self._end_silent, session_id) for session_id in silent]
        parts += [partial(self._drop_samplers, idle), partial(self.drop_replaced, REPLACED_S), self._forget_answers]
        parts += [self.checkpoints.remove_expired, self.tenants.refresh]
        for part in parts:
            try:
                part()
            except Exception:  # of one session or one file; the next ones do not wait for it
                log.exception("A part of the regular clean-up has failed.")

    def give_up(self, tenant: Tenant, session_ids: Collection[str]) -> bool:
        """End the session of a tenant that was silent for the longest time, beyond SILENT_S: whether there was one."""
        silent = [
            (s.last_sign, n) for n, s in self.sessions.items() if n in session_ids and s.tenant.name == tenant.name
        ]
        if not silent or min(silent)[0] > time.monotonic() - SILENT_S:
            return False
        self._end_silent(min(silent)[1])
        return True

    def drop_replaced(self, idle_s: float, tenant: str | None = None) -> None:
        """Forget snapshots of a model that has a newer one, and that had no request for `idle_s` seconds."""
        self._drop_samplers(replaced(dict(self.samplers), time.monotonic() - idle_s, tenant))

    def stored_bytes(self, tenant: str) -> int:
        """Bytes of a tenant's checkpoints and snapshots."""
        shots = {s.digest for s in list(self.samplers.values()) if s.tenant.name == tenant and s.model_path is None}
        return self.checkpoints.stored_bytes(tenant) + self.snapshots.num_bytes({digest for digest in shots if digest})

    def _end_silent(self, session_id: str) -> None:
        log.info("The session %s has ended without a word; its unsaved models are gone.", session_id)
        self.finish(session_id)

    def _forget_answers(self) -> None:
        now = time.monotonic()
        recent = {n: f for n, f in self.futures.items() if f.answer is None or now - f.done_at < KEEP_ANSWERS_S}
        self.futures = recent
        if now - self.in_work.began > KEEP_ANSWERS_S:  # until then a client may repeat a request that no journal has
            self.in_work.keep(recent)
        self.journal.forget_answers(KEEP_ANSWERS_S)

    def add_sampler(self, sampler: ServedSampler) -> None:
        """Add a sampler, unless its session has ended. The caller holds the lock of the snapshots."""
        if sampler.session_id not in self.sessions:
            return
        self.samplers[sampler.sampler_id] = sampler
        self.journal.sampler(
            sampler.sampler_id, sampler.session_id, sampler.base_model, sampler.digest, sampler.model_path
        )

    def _drop_samplers(self, names: list[str]) -> None:
        with self.snapshots.lock:
            for name in names:
                self.samplers.pop(name, None)
                self.journal.drop_sampler(name)
            self.snapshots.remove_unused({sampler.digest or "" for sampler in list(self.samplers.values())})

    # -- lookups: what belongs to another tenant does not exist -----------------------------------------------------------

    def model(self, call: ClientCall, model_id: str) -> ServedModel:
        model = self.models.get(model_id)
        if model is None or not call.tenant.sees(model.tenant.name):
            raise RefusedRequest(f"There is no model {model_id[:200]!r}. Its session may have ended.", 404)
        model.last_request = time.time()
        return model

    def sampler(self, call: ClientCall, sampler_id: str) -> ServedSampler:
        sampler = self.samplers.get(sampler_id)
        if sampler is None or not call.tenant.sees(sampler.tenant.name):
            raise RefusedRequest(f"There is no sampling session {sampler_id[:200]!r}.", 404)
        sampler.last_use = time.monotonic()
        return sampler

    def future(self, call: ClientCall, request_id: str) -> RequestFuture:
        future = self.futures.get(request_id)
        if future is None or not call.tenant.sees(future.tenant):
            raise RefusedRequest(
                f"There is no request {request_id[:80]!r}; it was answered long ago, or never made.", 404
            )
        return future

    def facts(self, call: ClientCall, model_id: str) -> dict[str, Any]:
        """The content of model.json of a model of the tenant."""
        facts = self.checkpoints.facts(model_id)
        if not call.tenant.sees(facts["tenant"]):
            raise RefusedRequest(f"There is no training run {model_id!r}.", 404)
        return facts

    def saved(self, call: ClientCall, uri: str) -> SavedAdapter:
        """A checkpoint that the tenant may read."""
        return self.checkpoints.read(self.addressed(call, uri, may_be_public=True))

    def addressed(self, call: ClientCall, uri: str, *, may_be_public: bool = False) -> SavedAdapter:
        """A checkpoint of the tenant, or if it `may_be_public`, of another one; it may be damaged."""
        saved = self.checkpoints.find(uri)
        if not (may_be_public and saved.is_public):
            try:
                self.facts(call, saved.model_id)
            except RefusedRequest as error:  # the sentence for one that does not exist
                raise RefusedRequest(f"There is no checkpoint {uri[:400]!r}.", 404) from error
        return saved

    def _tenants_of(self, base: BaseModel) -> set[str]:
        """The tenants with requests that wait and compute with a base model."""
        waiting = [future for future in self.futures.values() if future.answer is None]
        held = [(future, self.models.get(future.owner) or self.samplers.get(future.owner)) for future in waiting]
        return {future.tenant for future, one in held if one is not None and one.base_model in base.names}

    # -- requests ---------------------------------------------------------------------------------------------------------

    def add_model(
        self, call: ClientCall, model: ServedModel, make: Callable[[str], int], answer: WireAnswer
    ) -> RequestFuture:
        """Create a model: `make` does so on the computing thread; after a kill its last state does. Each returns the
        optimizer steps of the model."""
        earlier = self._earlier(call, model.model_id, 0)
        if earlier is not None:
            return earlier
        state = self.checkpoints.newest_state(model.model_id)
        if state is None:
            if call.stored is None:
                self.bases.require_fit(model.base, call.tenant.name)
            self.bases.admit(model.base, call.tenant.name, is_stored=call.stored is not None)
        future = self._future(call, model.model_id, model.session_id, 0)
        self.models[model.model_id] = model
        if state is not None:
            model.last_seq, model.state_seq, model.order.next_seq = state, state, state + 1
            make = partial(self._load_state, model, state)

        def create() -> WireAnswer:
            model.num_steps = make(model.model_id)
            model.run.rewind(model.num_steps)
            return answer

        self._lanes.put(model.model_id, self._job(0, future, Work(model, at_once(create), changes=True)))
        return future

    def queue(
        self, call: ClientCall, model: ServedModel, seq_id: int | None, prepare: Callable[[], Work]
    ) -> RequestFuture:
        """Queue a request of a model under its number. `prepare` checks it, and returns what to compute."""
        earlier = self._earlier(call, model.model_id, seq_id)
        if earlier is not None:
            return earlier
        seq_id = model.order.require_free(seq_id)
        work = prepare()
        self._admit(call, model.base, work.tokens, is_next=seq_id == model.order.next_seq)
        future = self._future(call, model.model_id, model.session_id, seq_id, work.tokens)
        self._release(model, seq_id, self._job(seq_id, future, work))
        return future

    def use_number(self, call: ClientCall) -> None:
        """Use the number of a request of a model that is refused, if both can be read: later ones would wait for it."""
        model_id, seq_id = request_number(call.body) or ("", 0)
        model = self.models.get(model_id)
        if model is not None and call.tenant.sees(model.tenant.name):
            with contextlib.suppress(RefusedRequest):  # it is used already
                self._refuse(model, model.order.require_free(seq_id), call.digest)

    def _refuse(self, model: ServedModel, seq_id: int, digest: str = "") -> None:
        request_id, owner = self._request_id(model.model_id, seq_id), model.model_id
        entry = AcceptedRequest(request_id, model.session_id, owner, seq_id, REFUSED, model.tenant.name, digest, None)
        self.journal.accept(entry)
        self._release(model, seq_id, None)

    def close_hole(self, model: ServedModel, after_s: float) -> bool:
        """Fail the requests of a model that wait for a number missing for `after_s` seconds, and use it."""
        now, is_coming = time.monotonic(), self.arriving[model.tenant.name] > 0
        if is_coming:
            model.order.moved_at = now
        if is_coming or not model.order.missing or now - model.order.moved_at < after_s:
            return False
        missing, first = model.order.holes(), model.order.next_seq
        reason = f"Request {first} of this model never came, so this one, which waited for it, was not computed. Send it again."
        for job in model.order.waiting():
            job.work.steps = failing(reason)
        for seq_id in missing:
            self._refuse(model, seq_id)
        return True

    def queue_sample(
        self, call: ClientCall, sampler: ServedSampler, seq_id: int | None, request: SamplingRequest
    ) -> RequestFuture:
        """Queue a sample request; a repeated one gets the same future."""
        earlier = self._earlier(call, sampler.sampler_id, seq_id)
        if earlier is not None:
            return earlier
        if seq_id is None or seq_id < 0:
            raise RefusedRequest("A request of a sampler needs a seq_id from 0 on.")
        tokens = len(request.tokens) + request.num_samples * request.max_tokens
        base = self.bases.named(sampler.base_model)
        self._admit(call, base, tokens)
        future = self._future(call, sampler.sampler_id, sampler.session_id, seq_id, tokens)
        future.place = self._least_busy()
        future.is_gone = call.stored is not None and sampler.session_id.startswith(ENDPOINT)
        job = QueuedJob(future, SampleJob(sampler.digest, request), sampler.tenant.name, tokens)
        lane = SampleLane.of(base, request.params, request.max_tokens)
        if self.in_work.is_suspect(future.request_id):
            lane = lane._replace(alone=future.request_id)
        self._sample_lanes[future.place].put(lane, job)
        return future

    def _least_busy(self) -> int:
        """The place of the process that samples for requests with the fewest tokens."""
        busy = [0] * len(self._sample_lanes)
        for future in self.futures.values() if len(busy) > 1 else ():
            if future.answer is None and future.place >= 0:
                busy[future.place] += future.tokens
        return busy.index(min(busy))

    def _load_state(self, model: ServedModel, seq_id: int, model_id: str) -> int:
        if self.bases.loaded(model.base) is None:  # it comes with its base model
            return self.checkpoints.steps_of_state(model_id, seq_id)
        return model.bench.put(model_id, self.checkpoints.load_state(model_id, seq_id))

    def _admit(self, call: ClientCall, base: BaseModel, tokens: int, *, is_next: bool = False) -> None:
        """Raise RefusedRequest for a request that is too large, or comes while too many of the tenant wait and not for it, or
        while its base model does not fit."""
        limit = call.tenant.limits.tokens
        self.bases.admit(base, call.tenant.name, is_stored=call.stored is not None)
        if call.stored is not None:
            return
        if tokens > limit:
            raise RefusedRequest(
                f"The request has {tokens} tokens, and one may have {limit}. Send fewer rows at a time."
            )
        waiting = sum(f.tokens for f in self.futures.values() if f.answer is None and f.tenant == call.tenant.name)
        if waiting and waiting + tokens > limit and not is_next:
            raise RefusedRequest(f"Requests with {waiting} tokens wait already, and {limit} may.", 429, RETRY_S)

    def _job(self, seq_id: int, future: RequestFuture, work: Work) -> QueuedJob:
        work.seq_id = seq_id
        if future.answer is not None and (failure := future.answer.failure) is not None:
            work.steps = failing(failure)  # what has failed before a kill fails again
        return QueuedJob(future, work, work.model.tenant.name, min(work.tokens, SLICE_TOKENS))

    def _release(self, model: ServedModel, seq_id: int, job: QueuedJob | None) -> None:
        for ready in model.order.add(seq_id, job):
            self._lanes.put(model.model_id, ready)

    def _earlier(self, call: ClientCall, owner: str, seq_id: int | None) -> RequestFuture | None:
        """The future of a request that came before. Raises RefusedRequest for another request under its number."""
        earlier = self.futures.get(self._request_id(owner, seq_id))
        if earlier is not None and earlier.digest != call.digest:
            raise RefusedRequest(f"The number {seq_id} belongs to another request.")
        return earlier

    def _future(self, call: ClientCall, owner: str, session_id: str, seq_id: int, tokens: int = 1) -> RequestFuture:
        request_id = self._request_id(owner, seq_id)
        future = RequestFuture(request_id, call.digest, owner, self.sessions[session_id].tenant.name, tokens)
        if call.stored is None:
            tenant, body = future.tenant, call.body
            entry = AcceptedRequest(request_id, session_id, owner, seq_id, call.route, tenant, call.digest, body)
            self.journal.accept(entry)
        elif call.stored.answer is not None:
            future.set(WireAnswer(call.stored.answer, call.stored.media_type or ""))
        self.futures[request_id] = future
        return future

    @staticmethod
    def _request_id(owner: str, seq_id: int | None) -> str:
        return hashlib.sha256(f"{owner}/{seq_id}".encode()).hexdigest()[:32]

    # -- after a kill, see recovery.py ------------------------------------------------------------------------------------

    def restore(self, call: ClientCall, request: AcceptedRequest) -> None:
        """Take the answer of a request that does not run again, and its number."""
        model = self.models.get(request.owner)
        if request.answer is not None:
            self._future(call, request.owner, request.session_id, request.seq_id)
        if model is not None and request.seq_id >= model.order.next_seq:
            self._release(model, request.seq_id, None)
