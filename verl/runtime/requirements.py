"""What a configuration needs: which roles exist and where old log-probs come from. Pure; decided once per run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl.algorithms.advantages import requires
from verl.config import VerlConfig

OldLogProbs = Literal["update", "rollout", "recompute"]


@dataclass(frozen=True)
class Needs:
    critic: bool
    reference: bool
    greedy_baseline: bool  # one greedy sample per prompt (ReMax)
    sum_pi_squared: bool  # optimal token baseline
    correction: bool  # importance weights or rejection between sampler and trainer
    bypass: bool  # the sampler's log-probs are the old ones

    @classmethod
    def of(cls, config: VerlConfig) -> Needs:
        columns = requires(config.algorithm.adv_estimator)
        correction = config.algorithm.rollout_correction
        uses_kl = config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward
        return cls(
            critic="values" in columns if config.critic.enable is None else bool(config.critic.enable),
            reference=uses_kl,
            greedy_baseline="reward_baselines" in columns,
            sum_pi_squared="sum_pi_squared" in columns,
            correction=bool(correction.rollout_is or correction.rollout_rs),
            bypass=bool(correction.bypass_mode),
        )


def old_log_prob_source(config: VerlConfig, needs: Needs, *, sampler_is_exact: bool, rows_per_step: int) -> OldLogProbs:
    """Where old log-probs come from, cheapest first.

    update: one optimizer step per batch, so the old policy is the current one and its log-probs fall out of the update;
    rollout: the sampler's own, when they equal the trainer's to rounding (or bypass mode says so);
    recompute: a forward pass.
    """
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if needs.bypass:
        return "rollout"
    if needs.sum_pi_squared or needs.correction:
        return "recompute"
    num_updates = actor.ppo_epochs * -(-rows_per_step // (actor.ppo_mini_batch_size * rollout.n))
    if num_updates == 1 and not config.algorithm.use_kl_in_reward:
        return "update"
    return "rollout" if sampler_is_exact and rollout.calculate_log_probs else "recompute"
