"""Pool of reward workers that can be killed: a call that hangs, crashes or exceeds a limit costs its own sample."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import secrets
import sys
import threading
import time
from bdb import BdbQuit
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from pathlib import Path

from verl.config.secrets import hide, hide_values
from verl.data_proto.samples import Score, ScoreRequest
from verl.errors import DeadlineError, RewardError
from verl.foreign_text import clean
from verl.parallel.framing import encode_frame
from verl.rewards.functions import RewardFunctionSpec
from verl.rewards.outcome import Outcome
from verl.rewards.process import START_TIMEOUT_S, Job, WorkerLost, WorkerProcess
from verl.rewards.sandbox.limits import Limits
from verl.rewards.worker import Caller, load_caller

GROW_AFTER_S = 0.2  # a job that has waited this long is worth starting another process for


class JobQueue:
    """First-in, first-out queue. A warm taker gets a job at once; a cold one would have to start a process, and gets only
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
            jobs = list(self._jobs)
            self._jobs.clear()
            self._warm.notify_all()
            self._cold.notify_all()
        return jobs


logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
LOOK_EVERY_S = 1.0  # at an idle worker


class RewardPool:
    """Up to `num_workers` processes that call one reward function, one call in flight each.

    `timeout_s`: seconds one call may take (a sample, or a batch for a batched function). `memory_mb`: MiB one process may
    allocate; None for no limit. `limits`: the other limits of the sandbox. `process_per_sample`: fork a process for each
    call. `default_score`: score of a sample whose call failed, None: it has none; `Score.error` says why. The first worker is
    started by `start`, further ones when a request has waited. `log_dir`: folder for the workers' prints.

        with RewardPool(RewardFunctionSpec("rewards.py"), num_workers=2, timeout_s=30, memory_mb=4096) as pool:
            scores = pool.score_all(requests)
    """

    def __init__(
        self,
        function: RewardFunctionSpec,
        *,
        num_workers: int,
        timeout_s: float,
        memory_mb: int | None,
        limits: Limits | None = None,
        process_per_sample: bool = False,
        default_score: float | None = None,
        log_dir: str | Path | None = None,
    ):
        self.function = function
        self.num_workers = max(1, num_workers)
        self.timeout_s = timeout_s
        self.limits = dataclasses.replace(limits or Limits(), memory_mb=memory_mb)
        self.process_per_sample = process_per_sample
        self.default_score = default_score
        self._log_dir = Path(log_dir) if log_dir else None
        self._data_sources: list[str] = []
        self._file_digest: str | None = None
        self._queue = JobQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._processes: dict[int, WorkerProcess] = {}
        self._shown_notices: set[str] = set()

    def start(self, data_sources: Sequence[str] = ()) -> None:
        """Start the first worker. It loads the function, checks its signature and imports the dependencies of the
        built-in scorers of `data_sources`. Raises RewardError with the cause."""
        if self._threads:
            return
        if self._queue.closed:
            raise RewardError("The reward workers are closed already.")
        self._data_sources = sorted(set(data_sources))
        if self._log_dir is not None:
            with contextlib.suppress(OSError):  # costs only the logs
                self._log_dir.mkdir(parents=True, exist_ok=True)
        ready: Future[None] = Future()
        self._add_thread(ready)
        try:
            ready.result()
        except BaseException:
            self.close()
            raise

    def submit(self, requests: Sequence[ScoreRequest]) -> Future[list[Score]]:
        """Queue one call of the function: with one request, or with a batch for a batched function. An error of the function is
        a Score with `error`. Raises RewardError for a request that JSON cannot carry."""
        if len(requests) != 1 and not self.function.batched:
            raise ValueError("A reward function that is not batched is called with one sample at a time.")
        self.start()
        job_id = secrets.token_hex(16)
        job = Job(job_id, list(requests), _encode_call(job_id, requests))
        self._queue.put(job)
        return job.future

    def score_all(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Scores in the order of the requests."""
        if not requests:
            return []
        calls = [requests] if self.function.batched else [[r] for r in requests]
        return self.wait([self.submit(call) for call in calls])

    def wait(self, futures: Sequence[Future[list[Score]]]) -> list[Score]:
        """Scores of these calls, in order. Raises DeadlineError when they exceed the sum of their time limits."""
        calls_per_worker = math.ceil(len(futures) / self.num_workers) + 1
        limit_s = calls_per_worker * 2 * (self.timeout_s + START_TIMEOUT_S)  # a second worker may be given the call
        _, pending = wait(futures, timeout=limit_s)
        if pending:
            raise DeadlineError(
                f"{len(pending)} of {len(futures)} calls of the reward function {self.function.label} did not end "
                f"within {limit_s:.0f} s."
            )
        return [score for future in futures for score in future.result()]

    def close(self) -> None:
        """Kill the workers; calls that are waiting or running end as defaulted. May be called again."""
        for job in self._queue.close():
            job.future.set_result([self.defaulted(r, "was not called: the run is ending") for r in job.requests])
        with self._lock:
            processes = list(self._processes.values())
        for process in processes:
            process.kill()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(CLOSE_TIMEOUT_S)

    def __enter__(self) -> RewardPool:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # One thread per worker: it owns the process, because on Linux a child tied to its parent is tied to the starting
    # thread.

    def _add_thread(self, ready: Future[None] | None = None) -> None:
        with self._lock:
            index = len(self._threads)
            if index >= self.num_workers or self._queue.closed:
                return
            thread = threading.Thread(target=self._work, args=(index, ready), name=f"reward-{index}", daemon=True)
            self._threads.append(thread)
        thread.start()

    def _work(self, index: int, ready: Future[None] | None) -> None:
        if ready is not None:
            try:
                self._start_process(index)
                ready.set_result(None)
            except BaseException as error:  # noqa: BLE001 - handed to the thread that waits in start()
                ready.set_exception(error)
                return
            self._add_thread()  # the next worker, cold until a request has waited
        has_successor = ready is not None
        while not self._queue.closed:
            job = self._queue.take(warm=index in self._processes, timeout_s=LOOK_EVERY_S)
            if job is None:
                self._look(index)
                continue
            if not has_successor:
                self._add_thread()
                has_successor = True
            try:
                scores = self._call(index, job)
            except BaseException as error:  # noqa: BLE001 - a bug of ours must reach the caller, not vanish here
                job.future.set_exception(error)
            else:
                job.future.set_result(scores)
            self._replace_if_dead(index)
        self._drop_process(index)

    def _call(self, index: int, job: Job) -> list[Score]:
        try:
            outcomes, seconds = self._score(index, job)
        except (WorkerLost, RewardError, OSError) as error:
            reason = "was stopped: the run is ending" if self._queue.closed else str(error)
            return [self.defaulted(request, reason) for request in job.requests]
        return self.scores(job.requests, outcomes, seconds)

    def scores(self, requests: Sequence[ScoreRequest], outcomes: Sequence[Outcome], seconds: float) -> list[Score]:
        scores = []
        for request, outcome in zip(requests, outcomes, strict=True):
            if "error" in outcome:
                scores.append(self.defaulted(request, outcome["error"]))
            else:
                scores.append(Score(request.key, outcome["score"], hide_values(outcome["parts"])))
            scores[-1].seconds = seconds / len(outcomes)
        return scores

    def _score(self, index: int, job: Job) -> tuple[list[Outcome], float]:
        process = self._processes.get(index)
        if process is None or not process.alive:
            process = self._start_process(index)
        try:
            return process.score(job, self.timeout_s)
        except WorkerLost as error:
            if not error.again or self._queue.closed:
                raise
            logger.warning("Sample %s is scored by another reward worker. The last one %s", job.requests[0].key, error)
            return self._start_process(index).score(job, self.timeout_s)

    def _look(self, index: int) -> None:
        process = self._processes.get(index)
        if process is None or not process.alive:
            return
        try:
            process.look()
        except WorkerLost as error:
            if self._queue.closed:
                return  # `close` has ended it
            logger.warning("A reward worker was ended; the next sample starts another. %s", error)

    def defaulted(self, request: ScoreRequest, what: str) -> Score:
        """The result for a sample without a usable score. `what` the function did: "took longer than 30 s"."""
        score = self.default_score or 0.0
        result = "it has no score" if self.default_score is None else f"it gets the default score {score:g}"
        return Score(
            request.key,
            score,
            dict.fromkeys(self.function.parts, score),  # the run reads them of every sample
            error=f"The reward function {self.function.label} {hide(what)}, for sample {request.key} of data_source "
            f"{clean(request.data_source, 100)!r}; {result}.",
        )

    def _start_process(self, index: int) -> WorkerProcess:
        self._drop_process(index)
        setup = {
            "function": dataclasses.asdict(self.function),
            "data_sources": self._data_sources,
            "process_per_sample": self.process_per_sample,
            "sys_path": sys.path,
        }
        self._warn_if_changed()
        log = self._log_dir / f"reward_worker_{index}.log" if self._log_dir else None
        try:
            process = WorkerProcess(setup, self.limits, log)
        except RewardError as error:
            if not getattr(error.__cause__, "again", False):
                raise
            logger.warning("A reward worker is started again. %s", error)  # it was killed from outside
            process = WorkerProcess(setup, self.limits, log)
        with self._lock:
            self._processes[index] = process
            notices = [n for n in process.sandbox.notices if n not in self._shown_notices]
            self._shown_notices.update(notices)
        for notice in notices:
            logger.warning("%s See docs/security.md.", notice)
        if self._queue.closed:
            process.kill()
        return process

    def _warn_if_changed(self) -> None:
        digest = self.function.file_digest()
        if self._file_digest is None:
            self._file_digest = digest
        elif digest is not None and digest != self._file_digest:
            self._file_digest = digest
            logger.warning(
                "The file %s changed during the run: reward workers that start from now on use the new version.",
                self.function.path,
            )

    def _replace_if_dead(self, index: int) -> None:
        """Replace a lost worker now, outside of any sample's time limit; a failure shows at the next sample."""
        process = self._processes.get(index)
        if self._queue.closed or (process is not None and process.alive):
            return
        try:
            self._start_process(index)
        except (RewardError, OSError) as error:
            logger.warning("A reward worker could not be started again: %s", error)

    def _drop_process(self, index: int) -> None:
        with self._lock:
            process = self._processes.pop(index, None)
        if process is not None:
            process.close()


def samples_of(requests: Sequence[ScoreRequest]) -> list[list[object]]:
    """Arguments of a call, as Caller.score takes them."""
    return [[r.data_source, r.solution_str, r.ground_truth, r.extra_info, r.from_model] for r in requests]


def _encode_call(job_id: str, requests: Sequence[ScoreRequest]) -> bytes:
    try:
        return encode_frame({"id": job_id, "samples": samples_of(requests)})
    except RewardError as error:
        if len(requests) > 1:  # name the one at fault
            for request in requests:
                _encode_call(job_id, [request])
        raise RewardError(f"Sample {requests[0].key} of data_source {requests[0].data_source!r}: {error}") from error


class DebugPool(RewardPool):
    """Pool for `reward.debug=True`: `submit` calls on its thread, one after the other, without sandbox and time limits, so that
    a breakpoint works. A call that raises costs its own sample; leaving the debugger ends the run."""

    caller: Caller | None = None

    def start(self, data_sources: Sequence[str] = ()) -> None:
        if self.caller is None:
            self.caller = load_caller(self.function, sorted(set(data_sources)), self.limits)
            self.caller.raised = (BdbQuit, KeyboardInterrupt)

    def submit(self, requests: Sequence[ScoreRequest]) -> Future[list[Score]]:
        from verl.parallel.torch_settings import run_settings  # with torch, for this pool only

        self.start()
        assert self.caller is not None
        future: Future[list[Score]] = Future()
        start = time.perf_counter()
        with run_settings():  # the function may change them
            outcomes = self.caller.score(samples_of(requests))
        future.set_result(self.scores(requests, outcomes, time.perf_counter() - start))
        return future
