"""Bypass mode: the sampler's log-probs are the old log-probs, and the correction uses the current policy."""

from torch import Tensor

from verl.algorithms.correction import rollout_correction
from verl.algorithms.policy_losses.clipped import vanilla
from verl.algorithms.policy_losses.terms import old_policy_kl, weighted
from verl.algorithms.reduce import Aggregate
from verl.data_proto.metrics import Metric
from verl.errors import ConfigError, nearest

LOSS_TYPES = ("ppo_clip", "reinforce")


def bypass_mode(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    agg: Aggregate,
    loss_type: str = "ppo_clip",
    rollout_is: str | None = None,
    rollout_is_threshold: float | str = 2.0,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
    rollout_is_batch_normalize: bool = False,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
) -> tuple[Tensor, dict[str, Metric]]:
    """PPO or REINFORCE loss with rho = current policy / sampler; `old_log_prob` are the sampler's log-probs.

    ppo_clip: the PPO loss with rho as its ratio, on the tokens that rejection keeps (no importance weights).
    reinforce: -A log_prob w with w the importance weights (1 without `rollout_is`) on the tokens that rejection keeps.
    With totals bound in `agg` a rejected token counts as a loss of 0; batch normalisation divides by the mean weight of the
    micro-batch. Metrics: the PPO loss's metrics or ppo_kl, and rollout_corr/*. Raises ConfigError on an unknown loss_type.
    """
    if loss_type not in LOSS_TYPES:
        hint = nearest(loss_type, LOSS_TYPES) or "; there are " + ", ".join(LOSS_TYPES)
        raise ConfigError(f"There is no algorithm.rollout_correction.loss_type {loss_type!r}{hint}")
    correction = rollout_correction(
        log_prob.detach(),
        old_log_prob,
        response_mask,
        rollout_is=rollout_is if loss_type == "reinforce" else None,
        rollout_is_threshold=rollout_is_threshold,
        rollout_rs=rollout_rs,
        rollout_rs_threshold=rollout_rs_threshold,
        rollout_is_batch_normalize=rollout_is_batch_normalize,
    )
    if loss_type == "ppo_clip":
        loss, metrics = vanilla(
            old_log_prob,
            log_prob,
            advantages,
            correction.response_mask,
            agg=agg,
            clip_ratio_low=clip_ratio_low,
            clip_ratio_high=clip_ratio_high,
            clip_ratio_c=clip_ratio_c,
        )
    else:
        loss = agg(weighted(-advantages * log_prob, correction.weights), correction.response_mask)
        metrics = {"ppo_kl": old_policy_kl(log_prob, old_log_prob, correction.response_mask)}
    return loss, {**metrics, **correction.metrics}
