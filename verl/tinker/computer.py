"""The thread that computes: jobs of the lanes, one slice at a time; answers in the journal; states of models on the disk."""

from __future__ import annotations

import errno
import json
import logging
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable

from verl.errors import DeadlineError, VerlError, WorkerLostError, os_error_of
from verl.tinker.checkpoints import Checkpoints, Snapshots
from verl.tinker.codec import PROTOBUF, sample_result
from verl.tinker.journal import RequestJournal, trouble
from verl.tinker.queues import Lanes, QueuedJob, SampleLane, WireAnswer
from verl.tinker.records import RefusedRequest, SampleOutput
from verl.tinker.served import ServedModel, Work
from verl.tinker.worker import Bench

log = logging.getLogger(__name__)

STATE_S = 20.0  # of computing between two states of a model on the disk: a kill repeats as much
STATE_SHARE = 20.0  # the least computing time between two, in times that writing one took
RETRY_S = 1.0
_CLOSE_S = 60.0
_LOST = (WorkerLostError, DeadlineError)  # no answer of a request: the next start computes it


class Computer:
    """Computes the jobs of `lanes` until `close`, or until it cannot, as when a process of `bench` is gone: `on_lost` gets the
    reason. `paused` says why answers wait: the disk takes no journal. `seconds` counts by tenant and kind of work."""

    def __init__(
        self,
        bench: Bench,
        checkpoints: Checkpoints,
        journal: RequestJournal,
        snapshots: Snapshots,
        lanes: Lanes,
        on_lost: Callable[[Exception], None],
    ):
        self.bench, self.checkpoints, self.journal, self.snapshots = bench, checkpoints, journal, snapshots
        self.lanes, self.paused, self._on_lost = lanes, "", on_lost
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)
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
                        self._sample(jobs)
                    else:
                        self._step(lane, jobs[0], jobs[0].work)
                except _LOST:
                    raise
                except Exception as error:  # noqa: BLE001  (of these requests; the next ones do not wait for it)
                    for job in jobs:
                        self._give(job, _failed(error), runs_again=False)
        except Exception as error:  # noqa: BLE001  (without this thread requests wait for ever)
            self._on_lost(error)

    def _step(self, lane: Hashable, queued: QueuedJob, work: Work) -> None:
        """Compute a slice of a request of a model; at the end of the request, give the answer."""
        start = time.perf_counter()
        try:
            answer = next(work.steps)
        except _LOST:
            raise
        except Exception as error:  # noqa: BLE001  (any failure is the answer of its request)
            answer = _failed(error)
            if work.failed is not None:
                work.failed(answer.failure or "")
        took_s = time.perf_counter() - start
        work.model.unsaved_s += took_s
        self.seconds[queued.tenant, "training_s"] += took_s
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
        if model.num_steps is None or model.num_tokens or model.failed:  # or in the middle of a step
            return
        if model.unsaved_s < due_s or seq_id <= model.state_seq:
            return
        start, model.unsaved_s = time.perf_counter(), 0.0
        try:
            adapter = model.bench.state(model.model_id, optimizer=True)
            self.checkpoints.save_state(model.model_id, seq_id, adapter)
        except _LOST:
            raise
        except Exception as error:  # noqa: BLE001  (the request is answered already)
            log.warning("The state of %s is not saved, so a kill would repeat more of it: %s", model.model_id, error)
            return
        self._state_took_s, model.state_seq = time.perf_counter() - start, seq_id
        self.journal.cover(model.model_id, seq_id)
        if self._write():
            self.checkpoints.drop_states(model.model_id, before=seq_id)

    def _sample(self, jobs: list[QueuedJob]) -> None:
        """Compute the samples of `jobs` in one batch; if it fails, in one for each request, so that one fails no other."""
        start, tokens = time.perf_counter(), sum(job.cost for job in jobs)
        try:
            answers = [WireAnswer(sample_result(output), PROTOBUF) for output in self._sampled(jobs)]
        except _LOST:
            raise
        except Exception as error:  # noqa: BLE001  (any failure is the answer of its requests)
            if len(jobs) > 1:
                for job in jobs:
                    self._sample([job])
                return
            answers = [_failed(error)] * len(jobs)
        took_s = time.perf_counter() - start
        for job, answer in zip(jobs, answers, strict=True):
            self.seconds[job.tenant, "sampling_s"] += took_s * job.cost / tokens
            self._give(job, answer, runs_again=False)

    def _sampled(self, jobs: list[QueuedJob]) -> list[SampleOutput]:
        """The samples of `jobs`; weights go to the sampling process once."""
        worker, digests = self.bench.sampling, {job.work.digest for job in jobs if job.work.digest is not None}
        weights = {digest: self.snapshots.load(digest) for digest in worker.missing(sorted(digests))}
        return worker.sample([(job.work.digest, job.work.request) for job in jobs], weights)


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
