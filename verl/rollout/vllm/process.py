"""`core.Core` in a separate process. A process that is lost is started again with its weights, and the call is repeated.

    update ──► buckets stay in shared memory until the next update ──► a new process is sent them again, and verifies them
    poll   ──► a lost generation is opened again with all its requests, sampled to the same bits; what came already is dropped

So nothing is lost but time. A process that is lost more often than max_engine_restarts between two updates ends the run.
"""

import logging
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from verl.config import full_key
from verl.data_proto.samples import Completion, PromptRequest, SampleKey, SamplingParams
from verl.errors import DeadlineError, WorkerLostError
from verl.rollout.api import Stats
from verl.rollout.process import EngineProcess
from verl.rollout.vllm.core import Core, Setup
from verl.rollout.vllm.weights import Description

log = logging.getLogger(__name__)

FACTORY = "verl.rollout.vllm.process:start"


def start(setup: dict[str, Any]) -> Core:
    """A Core made from `setup`; process_main calls this function in the separate process."""
    return Core(Setup(**setup))


class RemoteCore:
    """A proxy: the methods of `core.Core` are calls of the process. They raise what Core raises, WorkerLostError when the
    process ends, DeadlineError when it is silent for too long."""

    def __init__(self, setup: Setup, *, start_timeout_s: float, call_timeout_s: float, factory: str = FACTORY):
        self.process = EngineProcess(
            "vLLM",
            factory,
            asdict(setup),
            environment=setup.environment,
            start_timeout_s=start_timeout_s,
            call_timeout_s=call_timeout_s,
        )

    def __getattr__(self, method: str) -> Callable[..., object]:
        return partial(self.process.call, method)

    def close(self) -> None:
        """End the process."""
        self.process.close()

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, or was ended because it passed a deadline."""
        return self.process.has_ended


class RestartingCore:
    """The methods of `core.Core` on a process that `start` starts, and starts again when it is lost. The memory of buckets must
    keep its contents until the next update begins. With `sleeps`, vLLM discards the weights that buckets hold, and they are
    sent again if a generation comes before the next update. Raises WorkerLostError when the process was lost once more than
    `max_restarts`."""

    def __init__(self, start: Callable[[], Any], max_restarts: int, *, sleeps: bool = False):
        self._start, self._max_restarts, self._sleeps = start, max_restarts, sleeps
        self._num_restarts = 0  # since the last complete update
        self._buckets: list[Description] = []  # of the update under way, or of the last one
        self._updating = False
        self._digest: str | None = None  # of the last update, if it is complete
        self._discarded = False  # vLLM has slept without its weights
        self._opened: tuple[SamplingParams, int] | None = None
        self._requests: dict[SampleKey, PromptRequest] = {}  # of the open generation, the last of each sample
        self._running: set[SampleKey] = set()
        self.core = start()

    def __getattr__(self, method: str) -> Callable[..., object]:
        return partial(self._call, method)

    # -- generation

    def open(self, params: SamplingParams, step: int) -> None:
        self._call("open", params, step)
        self._opened, self._requests, self._running = (params, step), {}, set()

    def add(self, requests: list[PromptRequest]) -> None:
        self._call("add", requests)
        for request in requests:
            self._requests[request.ordinal, request.first_sample] = request
            self._running.add((request.ordinal, request.first_sample))

    def poll(self, timeout_s: float | None) -> list[Completion]:
        ended = [done for done in self._call("poll", timeout_s) if done.key in self._running]
        self._running -= {done.key for done in ended}
        return ended

    def abort(self, keys: list[SampleKey]) -> None:
        self._running -= set(keys)
        self._call("abort", keys)

    def close_generation(self) -> Stats:
        """See Core.close_generation; of the process that is there now, nothing if it was lost after its last sample."""
        self._opened, self._requests, self._running = None, {}, set()
        try:
            stats: Stats = self.core.close_generation()
        except (WorkerLostError, DeadlineError):  # the next call starts a new process
            return {}
        return stats

    # -- weights

    def begin_update(self) -> None:
        self._forget_weights()
        self._call("begin_update")
        self._updating = True

    def update(self, bucket: Description) -> None:
        self._call("update", bucket)
        # as it lies in host memory, since a bucket in GPU memory is written over soon
        self._buckets.append({key: value for key, value in bucket.items() if key != "devices"})

    def finish_update(self, manifest: str) -> None:
        self._call("finish_update", manifest)
        self._digest, self._updating, self._num_restarts = manifest, False, 0

    def abandon_update(self) -> None:
        self._forget_weights()
        self._call("abandon_update")

    def sleep(self, discards: bool = False) -> None:
        discards |= self._sleeps and self._digest is not None
        self._call("sleep", discards)
        self._discarded = discards

    def close(self) -> None:
        """End the process."""
        self.core.close()

    def _forget_weights(self) -> None:
        self._buckets, self._updating, self._digest, self._discarded = [], False, None, False

    def _send_weights(self) -> None:
        self.core.begin_update()
        for bucket in self._buckets:
            self.core.update(bucket)
        if self._digest is not None:
            self.core.finish_update(self._digest)
        self._discarded = False

    # -- restarts

    def _call(self, method: str, *arguments: object) -> Any:
        """The result of the method. A lost process is replaced by one with its weights and requests, which is called again."""
        is_lost = False
        while True:
            try:
                if is_lost:
                    self._rebuild()
                    is_lost = False
                if self._discarded and method == "open":
                    self._send_weights()
                return getattr(self.core, method)(*arguments)
            except (WorkerLostError, DeadlineError) as error:
                if not self.core.has_ended:
                    raise  # an answer of a process that continues
                self._count(error)
                is_lost = True

    def _count(self, error: WorkerLostError | DeadlineError) -> None:
        if self._num_restarts == self._max_restarts:
            raise WorkerLostError(
                f"vLLM's process was started again {self._num_restarts} times since its weights were complete "
                f"({full_key('rollout.max_engine_restarts')}), and was lost again: {error}"
            ) from error
        self._num_restarts += 1
        symptom = str(error).rpartition(". ")[0] or str(error)
        log.warning("%s. A new one is started (%d of %d).", symptom, self._num_restarts, self._max_restarts)

    def _rebuild(self) -> None:
        self.core.close()
        self.core = self._start()
        if self._updating or self._digest is not None:  # else it has the weights of the model's files, or none to use
            self._send_weights()
        if self._opened is not None:
            self.core.open(*self._opened)
            if self._running:
                # all of them: in a smaller batch matmuls round otherwise, and log-probs differ in their last bits
                self.core.add(list(self._requests.values()))
