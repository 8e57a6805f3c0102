"""PPO and its kin with samples made ahead of training: one step off, or k steps off.

          begin batch t+k ──► rollout ──► queue (qsize k+1) ──oldest──► reward ──► the step of program.py ──► publish
               ▲                 │ each sample as it ends ──────────────────▲                                   │
               └──────────────────────── weights of version t+1 for what begins from now on ◄──────────────────┘

Step t begins batch t+k under the weights of version t-1 and then trains on batch t, which began k steps before: every sample
is at most k = rollout.prefetch_num versions old, whatever the speed of the parts. Which batch trains when, and which weights
made it, follows from the order of calls and never from timing.

What is gained: where rollout has devices of its own it generates while the others train; everywhere, scores that take long
are waited for while others train. With rollout.partial_rollout a response is made in k+1 parts, one per step, each under the
newest weights; the column token_weight_version says which version made which token.

Samples are older than the policy that trains on them, so importance weights (algorithm.rollout_correction.rollout_is=token)
are on unless the config says otherwise, and old log-probs are computed under the current weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from verl.config import VerlConfig
from verl.data.loader import PromptLoader
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.programs.collect import Collector, prompts_per_generation, rollout_metrics
from verl.programs.ppo import PPO, StepResult
from verl.programs.rollout_queue import RolloutQueue
from verl.programs.state import TrainerState
from verl.runtime.requirements import old_log_prob_source
from verl.runtime.roles import Roles
from verl.runtime.worker_group import wait
from verl.tracking.ledger.records import OpenSample
from verl.tracking.ledger.tracker import SampleTracker
from verl.tracking.spans import Spans


class AsyncPPO(PPO):
    """`rollout_queue.qsize()` is the number of batches made or being made."""

    def __init__(
        self, config: VerlConfig, roles: Roles, loader: PromptLoader, spans: Spans, check_stop: Callable[[], None]
    ):
        super().__init__(config, roles, loader, spans, check_stop)
        self.collector = self.ahead = AheadCollector(config, roles, loader, spans, check_stop, self.samples)
        self.max_age = self.ahead.max_age
        self.old_log_probs = old_log_prob_source(
            config,
            self.needs,
            sampler_is_exact=False,
            rows_per_step=config.data.train_batch_size * config.actor_rollout_ref.rollout.n,
        )

    @property
    def rollout_queue(self) -> RolloutQueue:
        return self.ahead.queue

    def step(self, state: TrainerState) -> StepResult:
        """See PPO. What trained leaves the queue as the step succeeds."""
        result = super().step(state)
        # waited for at the end: where rollout has devices of its own, it generates while the others train
        result.metrics.update(rollout_metrics(wait(self.rollout_queue.figures)))
        self.rollout_queue.forget_before(self.samples.cursor)
        return result

    def collect(self, state: TrainerState) -> tuple[StepResult, int]:
        """See PPO. No sample of the batch is older than trainer.v1.sampler.max_off_policy_threshold versions."""
        self.ahead.version = state.weight_version
        result, next_ordinal = super().collect(state)
        result.metrics.update(age_metrics(result.batch, state.weight_version))
        result.metrics["training/off_policy/evicted_samples"] = Metric.last(self.ahead.num_evicted)
        result.metrics["training/rollout_queue/qsize"] = Metric.last(self.rollout_queue.qsize())
        return result, next_ordinal

    def settle(self) -> None:
        """See PPO."""
        self.rollout_queue.settle()

    def restore(self, waiting: Sequence[OpenSample]) -> None:
        """See PPO."""
        self.rollout_queue.restore(waiting)


class AheadCollector(Collector):
    """Takes its rounds from the queue. `version` is that of the weights that will train on them."""

    def __init__(
        self,
        config: VerlConfig,
        roles: Roles,
        loader: PromptLoader,
        spans: Spans,
        check_stop: Callable[[], None],
        samples: SampleTracker,
    ):
        super().__init__(config, roles, loader, spans, check_stop, samples)
        rollout = config.actor_rollout_ref.rollout
        self.queue = RolloutQueue(
            roles.rollout,
            loader,
            self.params,
            samples,
            count=prompts_per_generation(config),
            depth=rollout.prefetch_num + 1,
            partial=rollout.partial_rollout,
        )
        self.max_age = config.trainer.v1.sampler.max_off_policy_threshold
        self.version = 0
        self.num_evicted = 0

    def collect(self, step: int, ordinal: int) -> tuple[DataProto, dict[str, Metric], int]:
        """See Collector."""
        self.num_evicted = 0
        with self.spans("gen"):
            self.queue.advance(ordinal, step)
        self.queue.begin_scoring(self.roles.reward)
        return super().collect(step, ordinal)

    def sample(self, step: int, ordinal: int, count: int) -> tuple[DataProto, DataProto]:
        """See Collector."""
        with self.spans("rollout_wait"):
            prompts, batch, num_evicted = self.queue.take(ordinal, step, self.version, self.max_age)
        self.num_evicted += num_evicted
        return prompts, batch

    def end_generation(self) -> dict[str, Metric]:
        """See Collector. Generation goes on while others train; the step asks for its figures when it ends."""
        return {}


def age_metrics(batch: DataProto, version: int) -> dict[str, Metric]:
    """How many versions before `version` the oldest token of each sample was made, and how many versions made it."""
    columns = batch.batch
    mask = columns["response_mask"].bool()
    oldest = columns["weight_version"]
    newest = torch.where(mask, columns["token_weight_version"], 0).amax(dim=1)
    found = {"staleness": version - oldest, "spans": newest - oldest}
    return {
        f"training/off_policy/trajectory_{name}/{kind}": Metric.last(float(value))
        for name, values in found.items()
        for kind, value in (
            ("mean", values.double().mean()),
            ("max", values.max()),
            ("min", values.min()),
        )
    }
