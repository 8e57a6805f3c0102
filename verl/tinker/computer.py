"""The thread that computes: jobs of the lanes, one slice at a time; answers in the journal; states of models on the disk."""

import contextlib
import errno
import json
import logging
import math
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

from verl.errors import ModelError, VerlError, os_error_of
from verl.tinker.bases import Bases
from verl.tinker.checkpoints import Checkpoints
from verl.tinker.codec import PROTOBUF, sample_result
from verl.tinker.in_work import LOST, InWork
from verl.tinker.journal import RequestJournal, trouble
from verl.tinker.queues import SLICE_TOKENS, TURN_TOKENS, Lanes, QueuedJob, SampleLane, WireAnswer
from verl.tinker.records import RefusedRequest, SampleOutput
from verl.tinker.served import ServedModel, Work
from verl.tinker.snapshots import Snapshots

log = logging.getLogger(__name__)

STATE_S = 20.0  # of computing between two states of a model on the disk: a kill repeats as much
STATE_SHARE = 20.0  # the least computing time between two, in times that writing one took
RETRY_S = 1.0
_MOST_TOKENS = 65536  # prompts and longest samples of a tenant that decode at once, unless one request has more
_CLOSE_S = 60.0


class Computer:
    """Computes the jobs of `lanes` until `close`, or until it cannot, as when a process of the workers is gone: `on_lost` gets
    the reason. `place` is that of the worker that samples. `paused` says why answers wait: the disk takes no journal.
    `seconds` counts by tenant and kind of work."""

    def __init__(
        self,
        bases: Bases,
        checkpoints: Checkpoints,
        journal: RequestJournal,
        snapshots: Snapshots,
        in_work: InWork,
        lanes: Lanes,
        on_lost: Callable[[Exception], None],
        place: int = 0,
    ):
        self.bases, self.checkpoints, self.journal, self.snapshots = bases, checkpoints, journal, snapshots
        self.lanes, self.paused, self._on_lost, self.in_work = lanes, "", on_lost, in_work
        self._place = place
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)
        self._used: dict[tuple[str, bool], _Used] = defaultdict(_Used)
        self._lane_numbers, self._num_begun = dict[SampleLane, int](), 0
        self._closing, self._state_took_s = threading.Event(), 0.0
        self._thread = threading.Thread(target=self._run, name="tinker-compute", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End after the slice that is computed now."""
        self._closing.set()
        self.lanes.close()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            while (taken := self.lanes.take()) is not None:
                lane, jobs = taken
                try:
                    if isinstance(lane, SampleLane):
                        self._sample(lane, jobs)
                    else:
                        self._step(lane, jobs[0], jobs[0].work)
                except LOST:  # no answer of a request: the next start computes it
                    raise
                except Exception as error:  # noqa: BLE001  (of these requests; the next ones do not wait for it)
                    for job in jobs:
                        self._give(job, _failed(error), runs_again=False)
        except Exception as error:  # noqa: BLE001  (without this thread requests wait for ever)
            self._on_lost(error)

    @contextlib.contextmanager
    def _computing(self, jobs: list[QueuedJob]) -> Iterator[None]:
        """Inside, these jobs are computed. Raises ModelError for a job that ends the process each time; it is the only one."""
        names = [job.future.request_id for job in jobs]
        with self.in_work.computing(names):
            if reason := self.in_work.failure(names[0]):
                raise ModelError(reason)
            yield

    def _step(self, lane: Hashable, queued: QueuedJob, work: Work) -> None:
        """Compute a slice of a request of a model; at the end of the request, give the answer."""
        start = time.perf_counter()
        try:
            with self._computing([queued]):
                answer = next(work.steps)
        except LOST:
            raise
        except Exception as error:  # noqa: BLE001  (any failure is the answer of its request)
            answer = _failed(error)
            if work.failed is not None:
                work.failed(answer.failure or "")
        took_s = time.perf_counter() - start
        work.model.unsaved_s += took_s
        self.seconds[queued.tenant, "training_s"] += took_s
        if answer is not None:
            work.model.last_seq = max(work.model.last_seq, work.seq_id)
        if answer is None:
            self.lanes.put(lane, queued, first=True)
        elif self._give(queued, answer, runs_again=work.changes):
            self._save_state(work.model, work.seq_id)

    def _give(self, queued: QueuedJob, answer: WireAnswer, *, runs_again: bool) -> bool:
        """Enter an answer in the journal, then give it; waits for the disk. A request that was answered before a kill retains
        that answer. False when the service ends first."""
        if queued.future.answer is not None:
            return True
        start = time.perf_counter()
        self.journal.answer(queued.future.request_id, answer.body, answer.media_type, runs_again=runs_again)
        is_written = self._write()
        self.seconds[queued.tenant, "journal_s"] += time.perf_counter() - start
        if is_written:
            queued.future.set(answer)
        return not self._closing.is_set()

    def _write(self) -> bool:
        while True:
            try:
                self.journal.flush()
            except sqlite3.Error as error:
                if not self.paused:
                    log.error("%s Answers wait until %s can be written.", trouble(error), self.journal.path)
                self.paused = trouble(error)
                if self._closing.wait(RETRY_S):
                    return False
            else:
                self.paused = ""
                return True

    def _save_state(self, model: ServedModel, seq_id: int) -> None:
        """Save a model between optimizer steps when much was computed since the last time, so that a kill repeats little."""
        due_s = max(STATE_S, STATE_SHARE * self._state_took_s)
        if not model.is_between_steps or model.unsaved_s < due_s or seq_id <= model.state_seq:
            return
        start, model.unsaved_s = time.perf_counter(), 0.0
        try:
            adapter = model.bench.state(model.model_id, optimizer=True)
            self.checkpoints.save_state(model.model_id, seq_id, adapter)
        except LOST:
            raise
        except Exception as error:  # noqa: BLE001  (the request is answered already)
            log.warning("The state of %s is not saved, so a kill would repeat more of it: %s", model.model_id, error)
            return
        self._state_took_s, model.state_seq = time.perf_counter() - start, seq_id
        self.journal.cover(model.model_id, seq_id)
        if self._write():
            self.checkpoints.drop_states(model.model_id, before=seq_id)

    def _sample(self, lane: SampleLane, jobs: list[QueuedJob]) -> None:
        """Let a lane take its turn with the requests that fit; the ones that have not ended wait for its next turn. If it
        fails, each request gets a lane for itself, so that one fails no other."""
        start, (running, new) = time.perf_counter(), self._admitted(lane, self._staying(lane, jobs))
        if not running:
            return
        try:
            with self._computing(running):
                ended = self._advanced(lane, new)
        except LOST:
            raise
        except Exception as error:  # noqa: BLE001  (any failure is the answer of its requests)
            self._leave(lane, running, is_empty=True)
            for job in running:
                if lane.alone:
                    self._give(job, _failed(error), runs_again=False)
                else:
                    self.lanes.put(lane._replace(alone=job.future.request_id), job)
            return
        took_s, rows = time.perf_counter() - start, sum(job.work.request.num_samples for job in running)
        for job in running:
            share = job.work.request.num_samples / rows
            self.seconds[job.tenant, "sampling_s"] += took_s * share
            self.lanes.charge(job.tenant, math.ceil(TURN_TOKENS * share))
        done = [(job, ended[job.number]) for job in running if job.number in ended]
        going_on = [job for job in running if job.number not in ended]
        self._leave(lane, [job for job, _ in done], is_empty=not going_on)
        for job in reversed(going_on):
            self.lanes.put(lane, job, first=True)
        for job, output in done:
            self._give(job, WireAnswer(sample_result(output), PROTOBUF), runs_again=False)

    def _staying(self, lane: SampleLane, jobs: list[QueuedJob]) -> list[QueuedJob]:
        """The jobs whose clients wait; running ones whose client has gone leave the lane."""
        staying, gone = [job for job in jobs if not job.future.is_gone], [job for job in jobs if job.future.is_gone]
        begun = [job for job in gone if job.number is not None]
        if begun:
            worker = self.bases.bench(lane.base).samplers[self._place]
            worker.abort(self._lane_numbers[lane], [job.number or 0 for job in begun])
            self._leave(lane, begun, is_empty=all(job.number is None for job in staying))
        for job in gone:
            self._give(job, _failed(RefusedRequest("The client has gone.")), runs_again=False)
        return staying

    def _admitted(self, lane: SampleLane, jobs: list[QueuedJob]) -> tuple[list[QueuedJob], list[QueuedJob]]:
        """The jobs that run, and the new ones of them. A job begins if its tenant has room for it beside its running samples,
        or has none; small jobs have room for themselves. A job that does not fit waits for the next turn."""
        running, new = [job for job in jobs if job.number is not None], list[QueuedJob]()
        for job in [job for job in jobs if job.number is None]:
            used, rows = self._used[_room(job)], job.work.request.num_samples
            if not used.rows or (
                used.rows + rows <= lane.base.facts.most_rows and used.tokens + job.cost <= _MOST_TOKENS
            ):
                self._used[_room(job)] = _Used(used.rows + rows, used.tokens + job.cost)
                job.number, self._num_begun = self._num_begun, self._num_begun + 1
                self.lanes.charge(job.tenant, len(job.work.request.tokens))
                new.append(job)
            else:
                self.lanes.put(lane, job)
        return running + new, new

    def _leave(self, lane: SampleLane, jobs: list[QueuedJob], *, is_empty: bool) -> None:
        """Make the room of jobs free; a lane that is empty gets another number."""
        for job in jobs:
            used, job.number = self._used[_room(job)], None
            self._used[_room(job)] = _Used(used.rows - job.work.request.num_samples, used.tokens - job.cost)
        if is_empty:
            self._lane_numbers.pop(lane, None)

    def _advanced(self, lane: SampleLane, new: list[QueuedJob]) -> dict[int | None, SampleOutput]:
        """The samples that have ended, by the numbers of their jobs; weights go to the sampling process once."""
        worker, digests = (
            self.bases.bench(lane.base).samplers[self._place],
            {job.work.digest for job in new if job.work.digest is not None},
        )
        weights = {digest: self.snapshots.load(digest) for digest in worker.missing(sorted(digests))}
        requests = [(job.number or 0, job.work.digest, job.work.request) for job in new]
        number = self._lane_numbers.setdefault(lane, self._num_begun)
        return dict(worker.sample(number, lane.longest, requests, weights, TURN_TOKENS))


class _Used(NamedTuple):
    """Samples of a tenant that run, and the most tokens that they and their prompts can have."""

    rows: int = 0
    tokens: int = 0


def _room(job: QueuedJob) -> tuple[str, bool]:
    """The room that a sample request uses: the one of its tenant for large requests, or for small ones."""
    return job.tenant, job.cost <= SLICE_TOKENS


def _failed(error: Exception) -> WireAnswer:
    """The answer of a request that has failed: the sentence, and whether the request or the server is the cause."""
    system, category = os_error_of(error), "server"
    if isinstance(error, RefusedRequest):
        sentence, category = error.sentence, "user"
    elif isinstance(error, VerlError):
        sentence = str(error).partition(" [rank ")[0]  # the process is no matter of a client's
    elif system is not None and system.errno in (errno.ENOSPC, errno.EDQUOT):
        sentence = "The server's disk is full, so nothing was saved. Delete checkpoints, and save again."
    else:
        log.error("A request has failed.", exc_info=error)
        sentence = f"{type(error).__name__} in the server; its log has more."
    return WireAnswer(json.dumps({"error": sentence, "category": category}).encode())
