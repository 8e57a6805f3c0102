"""What an algorithm needs and what contradicts it."""

from __future__ import annotations

from typing import Any

from verl.config import names
from verl.config.active_keys import uses_critic
from verl.config.rules.api import Rule

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_CORRECTION = "algorithm.rollout_correction"


def _interval(value: Any) -> bool:
    """A number above 0, or 'low_high'."""
    try:
        bounds = [float(part) for part in str(value).split("_")]
    except ValueError:
        return False
    return len(bounds) in (1, 2) and all(b > 0 for b in bounds) and bounds == sorted(bounds)


def _rs_options(c: Any) -> list[str]:
    return [o.strip() for o in (c.algorithm.rollout_correction.rollout_rs or "").split(",") if o.strip()]


def _rs_thresholds_fit(c: Any) -> bool:
    value, options = c.algorithm.rollout_correction.rollout_rs_threshold, _rs_options(c)
    if not options:
        return True
    parts = [] if value is None else str(value).split(",")
    return len(parts) in (1, len(options)) and all(_interval(p) for p in parts)


ALGORITHMS = [
    Rule(
        f"{_ROLLOUT}.n",
        "error",
        lambda c, given: c.algorithm.adv_estimator == "grpo_passk" and c.actor_rollout_ref.rollout.n < 2,
        "algorithm.adv_estimator=grpo_passk compares the best two samples of a prompt. Set "
        "actor_rollout_ref.rollout.n to 2 or more.",
    ),
    Rule(
        f"{_ROLLOUT}.n",
        "warning",
        lambda c, given: (
            c.algorithm.adv_estimator in names.GROUP_ESTIMATORS
            and c.algorithm.adv_estimator != "grpo_passk"
            and c.actor_rollout_ref.rollout.n == 1
        ),
        "algorithm.adv_estimator={c.algorithm.adv_estimator} compares the samples of a prompt, and "
        "actor_rollout_ref.rollout.n=1 draws one. Set it to 5 or so.",
    ),
    Rule(
        "algorithm.gdpo_reward_keys",
        "error",
        lambda c, given: c.algorithm.adv_estimator == "gdpo" and not c.algorithm.gdpo_reward_keys,
        "algorithm.adv_estimator=gdpo needs the reward parts to weigh. Set algorithm.gdpo_reward_keys to keys "
        "that the reward function returns, for example [accuracy,format].",
    ),
    Rule(
        "algorithm.gdpo_reward_weights",
        "error",
        lambda c, given: (
            bool(c.algorithm.gdpo_reward_weights)
            and len(c.algorithm.gdpo_reward_weights) != len(c.algorithm.gdpo_reward_keys or [])
        ),
        "algorithm.gdpo_reward_weights={c.algorithm.gdpo_reward_weights} does not have one weight per key of "
        "algorithm.gdpo_reward_keys={c.algorithm.gdpo_reward_keys}.",
    ),
    Rule(
        "algorithm.use_pf_ppo",
        "error",
        lambda c, given: c.algorithm.use_pf_ppo and not uses_critic(c),
        "algorithm.use_pf_ppo=True resamples rows of PPO with a critic. Set algorithm.adv_estimator=gae, or remove it.",
    ),
    Rule(
        "critic.enable",
        "error",
        lambda c, given: c.algorithm.adv_estimator == "gae" and c.critic.enable is False,
        "algorithm.adv_estimator=gae needs the critic that critic.enable=False leaves out. Remove critic.enable, "
        "or choose an estimator without a critic, such as grpo.",
    ),
    Rule(
        "critic.enable",
        "warning",
        lambda c, given: (
            c.critic.enable is True
            and c.algorithm.adv_estimator in names.ADV_ESTIMATORS
            and c.algorithm.adv_estimator != "gae"
        ),
        "critic.enable=True trains a critic whose values algorithm.adv_estimator={c.algorithm.adv_estimator} "
        "does not use.",
    ),
    Rule(
        "algorithm.use_kl_in_reward",
        "warning",
        lambda c, given: c.algorithm.use_kl_in_reward and c.actor_rollout_ref.actor.use_kl_loss,
        "algorithm.use_kl_in_reward and actor_rollout_ref.actor.use_kl_loss are both True: the KL term acts twice.",
    ),
    Rule(
        "algorithm.filter_groups.enable",
        "warning",
        lambda c, given: c.algorithm.filter_groups.enable and c.actor_rollout_ref.rollout.n == 1,
        "algorithm.filter_groups.enable=True compares the samples of a prompt, and actor_rollout_ref.rollout.n=1 "
        "draws one: nothing is left out.",
    ),
    Rule(
        f"{_ACTOR}.policy_loss.dro_beta",
        "error",
        lambda c, given: (
            c.actor_rollout_ref.actor.policy_loss.loss_mode == "dro"
            and c.actor_rollout_ref.actor.policy_loss.dro_beta is None
        ),
        "actor_rollout_ref.actor.policy_loss.loss_mode=dro needs actor_rollout_ref.actor.policy_loss.dro_beta, a "
        "number above 0.",
    ),
    Rule(
        f"{_ACTOR}.policy_loss.loss_mode",
        "error",
        lambda c, given: (
            c.actor_rollout_ref.actor.policy_loss.loss_mode == "bypass_mode"
            and not c.algorithm.rollout_correction.bypass_mode
        ),
        "actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode belongs to "
        "algorithm.rollout_correction.bypass_mode=True. Set that instead.",
    ),
    Rule(
        f"{_CORRECTION}.rollout_rs",
        "error",
        lambda c, given: any(o not in names.ROLLOUT_RS for o in _rs_options(c)),
        "algorithm.rollout_correction.rollout_rs={correction.rollout_rs} has an unknown rule; there are "
        + ", ".join(names.ROLLOUT_RS)
        + ".",
    ),
    Rule(
        f"{_CORRECTION}.rollout_rs_threshold",
        "error",
        lambda c, given: not _rs_thresholds_fit(c),
        "algorithm.rollout_correction.rollout_rs_threshold={correction.rollout_rs_threshold} must be one bound "
        "for all rules, or one per rule of rollout_rs={correction.rollout_rs}, separated by commas; a bound is a "
        "number above 0 or low_high.",
    ),
    Rule(
        f"{_CORRECTION}.rollout_is_threshold",
        "error",
        lambda c, given: not _interval(c.algorithm.rollout_correction.rollout_is_threshold),
        "algorithm.rollout_correction.rollout_is_threshold={correction.rollout_is_threshold} must be a number "
        "above 0 or low_high.",
    ),
    Rule(
        f"{_ROLLOUT}.calculate_log_probs",
        "error",
        lambda c, given: (
            not c.actor_rollout_ref.rollout.calculate_log_probs
            and bool(
                c.algorithm.rollout_correction.bypass_mode
                or c.algorithm.rollout_correction.rollout_is
                or c.algorithm.rollout_correction.rollout_rs
            )
        ),
        "algorithm.rollout_correction needs the sampled log-probabilities. Set "
        "actor_rollout_ref.rollout.calculate_log_probs=True.",
    ),
]
