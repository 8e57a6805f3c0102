"""A vLLM process that comes back: one that is lost is started anew, with the weights that it had, and goes on with the call.

    update ──► buckets stay in shared memory until the next update ──► a new process is sent them again, proved as before
    generate ──► samples that had ended are kept ──► all are drawn again, to the same bits (draws are keyed); the others count

So nothing is lost but time. A process that is lost more often than max_engine_restarts between two updates ends the run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from verl.data_proto.samples import Completion, PromptRequest, SamplingParams
from verl.errors import DeadlineError, WorkerLostError
from verl.rollout.api import OnFinish
from verl.rollout.vllm.core import Figures
from verl.rollout.vllm.process import RemoteCore
from verl.rollout.vllm.weights import Description

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class RebuiltCore:
    """The methods of `core.Core`, on a process that `start` starts. The memory of buckets must hold what was written until the
    next update begins. Raises what they raise, WorkerLostError when the process was lost once more than `max_restarts`."""

    def __init__(self, start: Callable[[], RemoteCore], max_restarts: int):
        self._start, self._max_restarts = start, max_restarts
        self._num_restarts = 0  # since the last whole update
        self._buckets: list[Description] = []  # of the update that is going on, or of the last one
        self._updating = False
        self._digest: str | None = None  # of the last update, if it is whole
        self.core = start()

    def generate(
        self, prompts: Sequence[PromptRequest], params: SamplingParams, *, step: int, on_finish: OnFinish
    ) -> Figures:
        """See Core.generate. Figures of prompts, tokens and time are of all processes that had a part in it."""
        started_at = time.perf_counter()
        left = {(p.ordinal, p.first_sample + i) for p in prompts for i in range(params.n)}
        num_prompt_tokens, num_asked, lengths = sum(len(p.token_ids) for p in prompts), len(left), []

        def take(done: Completion) -> None:
            if (done.ordinal, done.sample) in left:
                left.remove((done.ordinal, done.sample))
                lengths.append(len(done.token_ids))
                on_finish(done)

        def run(core: RemoteCore) -> Figures:
            # the whole batch: in a smaller one matrix products round otherwise, and log-probs differ in their last bits
            return core.generate(prompts, params, step=step, on_finish=take) if left else {}

        figures = self._with_process(run)
        return {
            "num_prompt_tokens_computed": num_prompt_tokens,
            "num_decode_steps": max(lengths, default=0),
            "max_running": num_asked,
            "kv_cache_bytes": 0,
            **figures,
            "num_prompt_tokens": num_prompt_tokens,
            "num_generated_tokens": sum(lengths),
            "seconds": time.perf_counter() - started_at,
        }

    def try_bucket(self, bucket: Description) -> None:
        """See Core.try_bucket."""
        self._with_process(lambda core: core.try_bucket(bucket))

    def begin_update(self) -> None:
        """See Core.begin_update."""
        self._forget_weights()
        self._with_process(lambda core: core.begin_update())
        self._updating = True

    def update(self, bucket: Description) -> None:
        """See Core.update."""
        self._with_process(lambda core: core.update(bucket))
        # as it lies in memory of the host: that of a GPU is written over soon
        self._buckets.append({key: value for key, value in bucket.items() if key != "device"})

    def finish_update(self, manifest: str) -> None:
        """See Core.finish_update."""
        self._with_process(lambda core: core.finish_update(manifest))
        self._digest, self._updating, self._num_restarts = manifest, False, 0

    def abandon_update(self) -> None:
        """See Core.abandon_update."""
        self._forget_weights()
        self._with_process(lambda core: core.abandon_update())

    def sleep(self) -> None:
        """See Core.sleep."""
        self._with_process(lambda core: core.sleep())

    def close(self) -> None:
        """End the process."""
        self.core.close()

    def _forget_weights(self) -> None:
        self._buckets, self._updating, self._digest = [], False, None

    def _with_process(self, call: Callable[[RemoteCore], Result]) -> Result:
        """`call` on the process, or on a new one that was brought to where the old one was before this call."""
        stands = True
        while True:
            try:
                if not stands:
                    self._rebuild()
                    stands = True
                return call(self.core)
            except (WorkerLostError, DeadlineError) as error:
                if not self.core.has_ended:
                    raise  # an answer of a process that goes on
                self._count(error)
                stands = False

    def _count(self, error: WorkerLostError | DeadlineError) -> None:
        if self._num_restarts == self._max_restarts:
            raise WorkerLostError(
                f"vLLM's process was started anew {self._num_restarts} times since its weights were whole "
                f"(actor_rollout_ref.rollout.max_engine_restarts), and was lost again: {error}"
            ) from error
        self._num_restarts += 1
        what = str(error).rpartition(". ")[0] or str(error)
        log.warning("%s. A new one is started (%d of %d).", what, self._num_restarts, self._max_restarts)

    def _rebuild(self) -> None:
        self.core.close()
        self.core = self._start()
        if not self._updating and self._digest is None:
            return  # it has the weights of the model's files, or none that may be used
        self.core.begin_update()
        for bucket in self._buckets:
            self.core.update(bucket)
        if self._digest is not None:
            self.core.finish_update(self._digest)
