"""PPO and its family with samples generated ahead of training: one step off-policy, or k steps.

          start batch t+k ──► rollout ──► queue (qsize k+1) ──oldest──► reward ──► the step of PPO ──► weight sync
               ▲                 │ each sample as it ends ──────────────────▲                               │
               └──────────────────────── weights of version t+1 for all that starts from now on ◄──────────┘

Step t starts batch t+k under the weights of version t-1 and then trains on batch t, started k steps before. Every sample is at
most k = rollout.prefetch_num versions old, at any speed of the parts. The batch of a step, and the weights that made it, follow
from the order of calls and never from timing.

A rollout with separate devices generates while the models train. On all placements, slow scores are waited for while the models
train. With rollout.partial_rollout a response is generated in k+1 parts, one per step, each under the newest weights. The parts
of a step share one generation. The column token_weight_version holds the version of each token. With
rollout.keep_partial_kv_cache a part sees the keys and values of earlier parts as their weights computed them. With
trainer.v1.separate_async.parameter_sync_step=N the weights travel every N steps, and samples are up to N - 1 versions older.

Samples are older than the policy that trains on them, so importance weights (algorithm.rollout_correction.rollout_is=token)
are on unless the config says otherwise, and old log-probs are computed under the current weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from verl.config import PPOConfig
from verl.config.active_keys import runs_agents
from verl.data.order import prompts_per_generation
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.programs.api import PROGRAMS, Program, RunContext
from verl.programs.collect import Collector, rollout_metrics
from verl.programs.ppo import PPO
from verl.programs.ppo_data import PPOData
from verl.programs.ppo_roles import old_log_prob_source
from verl.programs.rollout_queue import RolloutQueue
from verl.roles.api import Roles
from verl.roles.guards import StepBatch
from verl.rollout.api import keeps_keys
from verl.tracking.ledger.records import OpenSample


class AsyncPPO(PPO):
    """`rollout_queue.qsize()` is the number of batches that are finished or being generated."""

    @classmethod
    def select(cls, config: PPOConfig) -> type[Program[Any]]:
        """The program of algorithm.program; of PPO this one if rollout.prefetch_num asks for samples ahead of training."""
        if config.algorithm.program != "ppo":
            return cast("type[Program[Any]]", PROGRAMS.get(config.algorithm.program))
        return cls if config.actor_rollout_ref.rollout.prefetch_num > 0 else PPO

    def __init__(self, config: PPOConfig, data: PPOData, roles: Roles, run: RunContext):
        super().__init__(config, data, roles, run)
        if data.train is not None:
            self.collector = self.ahead = AheadCollector(
                config, self.roles_of_run, data.train, run, self.samples, self.stages, self.reads_data
            )
            self.max_age = self.ahead.max_age
        self.old_log_probs = old_log_prob_source(config, self.needs, sampler_is_exact=False)

    @property
    def rollout_queue(self) -> RolloutQueue:
        return self.ahead.queue

    def train(self, step: int) -> StepBatch:
        """See PPO. What trained leaves the queue as the step succeeds."""
        result = super().train(step)
        # waited for at the end: a rollout with separate devices generates while the models train
        result.metrics.update(rollout_metrics(*(part.get() for part in self.rollout_queue.metrics)))
        self.rollout_queue.forget_before(self.samples.cursor)
        return result

    def collect(self, step: int) -> tuple[StepBatch, int]:
        """See PPO. No sample of the batch is older than trainer.v1.sampler.max_off_policy_threshold versions."""
        self.ahead.version, self.ahead.num_steps = self.weight_version, self.data.num_steps
        result, next_ordinal = super().collect(step)
        result.metrics.update(age_metrics(result.batch, self.weight_version))
        result.metrics["training/off_policy/evicted_samples"] = Metric.last(self.ahead.num_evicted)
        result.metrics["training/rollout_queue/qsize"] = Metric.last(self.rollout_queue.qsize())
        return result, next_ordinal

    def send_weights(self, step: int) -> None:
        """See PPOProgram. In between the sampler keeps its weights, and its samples their version."""
        v1 = self.config.trainer.v1
        if v1.trainer_mode != "separate_async" or step % v1.separate_async.parameter_sync_step == 0:
            super().send_weights(step)

    def drain(self) -> None:
        """See Program."""
        self.rollout_queue.drain()

    def restore(self, waiting: Sequence[OpenSample]) -> None:
        self.rollout_queue.restore(waiting)


@dataclass(eq=False)
class AheadCollector(Collector):
    """A Collector that takes its rounds from the queue. `version` is the version of the weights that will train on them,
    `num_steps` the last step of the run."""

    syncs = False  # weights may travel every N steps

    def __post_init__(self) -> None:
        super().__post_init__()
        config, rollout = self.config, self.config.actor_rollout_ref.rollout
        self.queue = RolloutQueue(
            self.roles.rollout,
            self.loader,
            self.params,
            self.samples,
            count=prompts_per_generation(config),
            depth=rollout.prefetch_num + 1,
            partial=rollout.partial_rollout,
            keeps_kv=keeps_keys(rollout) and (rollout.partial_rollout or rollout.in_flight_updates),
            in_flight=rollout.in_flight_updates,
            agents_folder=self.run.folder if runs_agents(config) else None,
            records_experts=rollout.enable_rollout_routing_replay,
        )
        self.max_age = config.trainer.v1.sampler.max_off_policy_threshold
        self.version = self.num_steps = self.num_evicted = 0

    def collect(self, step: int, ordinal: int) -> tuple[DataProto, dict[str, Metric], int]:
        self.num_evicted = 0
        with self.spans("gen"):
            self.queue.advance(ordinal, step, num_left=max(1, self.num_steps - step + 1))
        self.queue.start_scoring(self.roles.reward)
        return super().collect(step, ordinal)

    def sample(self, step: int, ordinal: int, count: int) -> tuple[DataProto, DataProto]:
        with self.spans("rollout_wait"):
            prompts, batch, num_evicted = self.queue.take(ordinal, step, self.version, self.max_age)
        self.num_evicted += num_evicted
        return prompts, batch

    def end_generation(self) -> dict[str, Metric]:
        """See Collector. Generation continues while the models train; the step asks for its metrics when it ends."""
        return {}


def age_metrics(batch: DataProto, version: int) -> dict[str, Metric]:
    """Of the rows that train: versions between `version` and the oldest token of each sample, and the number of versions that
    made it."""
    columns = batch.batch
    mask = columns["response_mask"].bool()
    trains = mask.any(dim=1)
    if not trains.any():
        return {}
    oldest = columns["weight_version"][trains]
    newest = torch.where(mask, columns["token_weight_version"], 0).amax(dim=1)[trains]
    ages = {"staleness": version - oldest, "spans": newest - oldest}
    return {
        f"training/off_policy/trajectory_{name}/{kind}": Metric.last(float(value))
        for name, values in ages.items()
        for kind, value in (("mean", values.double().mean()), ("max", values.max()), ("min", values.min()))
    }
