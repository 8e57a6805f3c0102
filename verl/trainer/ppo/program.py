"""PPO and its critic-free kin (GRPO, RLOO, ReMax, ...) as one program over roles.

    loader ──prompts──► rollout ──each sample as it ends──► reward
                           │                                  │
                           └────────── batch ◄─────scores─────┘
                                        │
          reference (KL terms only) ────┤ log-probs
          actor (only if they differ) ──┤ old log-probs
          critic (GAE only) ────────────┤ values
                                        ▼
                     rewards - KL, correction, advantages      (small columns, here)
                                        │
                        critic.update ──┴── actor.update ──► rollout.publish(version + 1)

Which functions fill the boxes comes from the config; which process runs a role is the runtime's business. Every phase runs
under a span, and a requested stop is honoured between phases, before any weight of the step has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import numpy as np
import torch

from verl.algorithms.advantages import compute_advantage
from verl.algorithms.correction import rollout_correction, rollout_gap_metrics
from verl.algorithms.filters import filter_groups, pf_ppo_indices
from verl.algorithms.kl import apply_kl_penalty
from verl.config import VerlConfig
from verl.controller.needs import Needs, old_log_prob_source
from verl.controller.roles import Roles
from verl.data.loader import PromptLoader
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.errors import ConfigError, DataError
from verl.tracking.spans import Spans
from verl.trainer.state import TrainerState
from verl.workers.policy import require_finite


@dataclass
class StepResult:
    batch: DataProto  # the rows that trained, with every column that was made for them
    metrics: dict[str, Metric] = field(default_factory=dict)


class PPO:
    """`check_stop` is called between phases and raises to abandon the step."""

    def __init__(
        self, config: VerlConfig, roles: Roles, loader: PromptLoader, spans: Spans, check_stop: Callable[[], None]
    ):
        self.config = config
        self.roles = roles
        self.loader = loader
        self.spans = spans
        self.check_stop = check_stop
        self.needs = Needs.of(config)
        self.old_log_probs = old_log_prob_source(
            config,
            self.needs,
            sampler_is_exact=roles.rollout.exact_log_probs,
            rows_per_step=config.data.train_batch_size * config.actor_rollout_ref.rollout.n,
        )

    def step(self, state: TrainerState) -> StepResult:
        """One step; `state` (next prompt, KL controller, weight version) moves on only as the step succeeds."""
        result, next_ordinal = self.collect(state)
        self.check_stop()
        self.annotate(result)
        self.check_stop()
        self.assign_credit(result, state)
        self.check_stop()
        self.update(result, state)
        state.next_ordinal = next_ordinal
        return result

    def collect(self, state: TrainerState) -> tuple[StepResult, int]:
        """Samples with scores. With a group filter, generates until enough groups carry a signal."""
        data, rule = self.config.data, self.config.algorithm.filter_groups
        wanted = data.train_batch_size
        kept: list[DataProto] = []
        num_groups, num_rounds, ordinal = 0, 0, state.next_ordinal
        while num_groups < wanted:
            self._check_rounds(num_rounds, num_groups)
            count = data.gen_batch_size or wanted
            with self.spans("gen"):
                prompts = self.loader.take(ordinal, count)
                batch = self.roles.rollout.generate(prompts, step=state.step)
            with self.spans("reward"):
                batch = batch.union(self.roles.reward.collect(batch))
            if self.needs.greedy_baseline:
                batch = batch.union(self.greedy_baseline(prompts, state.step, batch))
            if rule.enable:
                batch = batch.select_idxs(filter_groups(self._filter_metric(batch), batch.non_tensor_batch["uid"]))
            kept.append(batch)
            num_groups += len(set(batch.non_tensor_batch["uid"]))
            num_rounds, ordinal = num_rounds + 1, ordinal + count
            self.check_stop()
        stats = self.roles.rollout.end_generation()
        metrics = {f"rollout/{k}": Metric.last(float(v)) for k, v in stats.items()}
        if rule.enable:
            metrics["training/filter_groups/num_gen_batches"] = Metric.last(num_rounds)
            metrics["training/filter_groups/num_groups_kept"] = Metric.last(num_groups)
        batch = DataProto.concat(kept) if len(kept) > 1 else kept[0]
        return StepResult(first_groups(batch, wanted), metrics), ordinal

    def greedy_baseline(self, prompts: DataProto, step: int, batch: DataProto) -> DataProto:
        """Column reward_baselines [batch]: the score of the greedy sample of the row's prompt (ReMax)."""
        with self.spans("gen_max"):
            rollout = self.roles.rollout
            greedy = rollout.generate(prompts, step=step, split="greedy", params=rollout.greedy())
        with self.spans("reward"):
            scores = self.roles.reward.collect(greedy).batch["token_level_scores"].sum(dim=1)
        by_uid = dict(zip(greedy.non_tensor_batch["uid"], scores.tolist(), strict=True))
        return DataProto.from_dict(
            {"reward_baselines": torch.tensor([by_uid[u] for u in batch.non_tensor_batch["uid"]])}
        )

    def annotate(self, result: StepResult) -> None:
        """Log-probs and values under the weights that made the samples."""
        batch, roles = result.batch, self.roles
        if self.old_log_probs == "recompute" and roles.actor is not None:
            with self.spans("old_log_prob"):
                batch.union(roles.actor.log_probs(batch, sum_pi_squared=self.needs.sum_pi_squared))
            require_finite(batch, "old_log_probs", "The actor's forward pass")
            entropy = batch.batch["entropys"][batch.batch["response_mask"]]
            result.metrics["actor/entropy"] = Metric.mean(entropy.mean(), weight=entropy.numel())
        elif self.old_log_probs == "rollout":
            batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"].clone()
        if roles.reference is not None:
            with self.spans("ref"):
                batch.union(roles.reference.log_probs(batch))
        if roles.critic is not None:
            with self.spans("values"):
                batch.union(roles.critic.values(batch))
            require_finite(batch, "values", "The critic's forward pass")

    def assign_credit(self, result: StepResult, state: TrainerState) -> None:
        """Scores to advantages: KL in reward, rollout correction, the estimator, PF-PPO's resampling."""
        with self.spans("adv"):
            algorithm, batch = self.config.algorithm, result.batch
            columns = batch.batch
            columns["token_level_rewards"] = columns["token_level_scores"]
            if algorithm.use_kl_in_reward:
                result.metrics.update(self._penalise_kl(batch, state))
            if self.old_log_probs == "recompute":
                result.metrics.update(self._correct(batch))
            columns["advantages"], columns["returns"] = compute_advantage(
                algorithm.adv_estimator,
                {**dict(columns.items()), **batch.non_tensor_batch},
                config=algorithm,
                gamma=algorithm.gamma,
                lam=algorithm.lam,
                norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
                gdpo_reward_keys=algorithm.gdpo_reward_keys,
                gdpo_reward_weights=algorithm.gdpo_reward_weights,
            )
            if algorithm.use_pf_ppo:
                rule, generator = algorithm.pf_ppo, torch.Generator().manual_seed(state.step)
                scores = columns["token_level_scores"].sum(dim=1)
                rows = pf_ppo_indices(scores, rule.reweight_method, rule.weight_pow, generator)
                result.batch = batch.select_idxs(rows)

    def _penalise_kl(self, batch: DataProto, state: TrainerState) -> dict[str, Metric]:
        columns, controller = batch.batch, state.kl_controller
        beta = controller.value
        columns["token_level_rewards"], mean_kl = apply_kl_penalty(
            columns["token_level_scores"], columns["old_log_probs"], columns["ref_log_prob"], columns["response_mask"],
            beta=beta, kind=self.config.algorithm.kl_penalty,
        )  # fmt: skip
        controller.update(float(mean_kl), n_steps=len(batch))
        return {"actor/reward_kl_penalty": Metric.last(mean_kl), "actor/reward_kl_penalty_coeff": Metric.last(beta)}

    def _correct(self, batch: DataProto) -> dict[str, Metric]:
        """Weigh or reject what the sampler drew too differently from the trainer; always measure how far they are."""
        columns, rule = batch.batch, asdict(self.config.algorithm.rollout_correction)
        for name in ("bypass_mode", "loss_type"):
            del rule[name]
        old, sampled, mask = columns["old_log_probs"], columns["rollout_log_probs"], columns["response_mask"]
        found = rollout_correction(old, sampled, mask, **rule)
        if found.weights is not None:
            columns["rollout_is_weights"] = found.weights
        columns["response_mask"] = found.response_mask
        return {**found.metrics, **rollout_gap_metrics(old[mask], sampled[mask])}

    def update(self, result: StepResult, state: TrainerState) -> None:
        """The only phase that changes weights; the sampler carries the next version when it ends."""
        roles, batch = self.roles, result.batch
        if roles.critic is not None:
            with self.spans("update_critic"):
                result.metrics.update(roles.critic.update(batch, state.step))
        if roles.actor is not None and state.step > self.config.trainer.critic_warmup:
            with self.spans("update_actor"):
                result.metrics.update(roles.actor.update(batch, state.step))
        with self.spans("update_weights"):
            state.weight_version += 1
            roles.rollout.publish(state.weight_version)

    def _filter_metric(self, batch: DataProto) -> list[float]:
        """[batch] figures that the group filter compares: the score, or a part that the reward function returned."""
        name = self.config.algorithm.filter_groups.metric
        if name in ("reward", "score", "seq_reward", "seq_final_reward"):
            return batch.batch["token_level_scores"].sum(dim=1).tolist()
        found = batch.non_tensor_batch["reward_parts"]
        lacking = next((parts for parts in found if name not in parts), None)
        if lacking is not None:
            raise ConfigError(
                f"algorithm.filter_groups.metric={name} is not among what the reward function returns: score"
                f"{''.join(', ' + part for part in sorted(lacking))}. Name one of them."
            )
        return [float(parts[name]) for parts in found]

    def _check_rounds(self, num_rounds: int, num_groups: int) -> None:
        limit = self.config.algorithm.filter_groups.max_num_gen_batches or 100
        if num_rounds >= limit:
            raise DataError(
                f"After {num_rounds} generation batches only {num_groups} of {self.config.data.train_batch_size} groups had "
                "rewards that differ within the group. The task is too easy or too hard for this model; raise "
                "algorithm.filter_groups.max_num_gen_batches or rollout.n, or change the data."
            )


def first_groups(batch: DataProto, count: int) -> DataProto:
    """The rows of the first `count` groups, in order."""
    seen: dict[str, None] = dict.fromkeys(batch.non_tensor_batch["uid"])
    if len(seen) <= count:
        return batch
    wanted = set(list(seen)[:count])
    return batch.select_idxs(np.array([uid in wanted for uid in batch.non_tensor_batch["uid"]]))
