"""Losses on a clipped probability ratio, of tokens (PPO with dual clip, CISPO) or of sequences (GSPO, GMPO)."""

import torch
from torch import Tensor

from verl.algorithms.masked import masked_mean, masked_sum, token_mean
from verl.algorithms.policy_losses.terms import clip_metrics, probability_ratio, weighted, zero_without_advantage
from verl.algorithms.reduce import Aggregate
from verl.data_proto.metrics import Metric
from verl.errors import ConfigError


@zero_without_advantage
def vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    agg: Aggregate,
    rollout_is_weights: Tensor | None = None,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
) -> tuple[Tensor, dict[str, Metric]]:
    """PPO (1707.06347) with separate clips (DAPO, 2503.14476) and dual clip (1912.09729, eq. 5).

    l = max(-A r, -A clip(r, 1 - low, 1 + high)); where A < 0, at most -A c. Metrics: pg_clipfrac (the clip acts),
    pg_clipfrac_lower (the dual clip acts), ppo_kl. Raises ConfigError unless clip_ratio_c > 1.
    """
    if clip_ratio_c <= 1.0:
        raise ConfigError(f"actor.clip_ratio_c={clip_ratio_c} must be greater than 1 (dual clip); 3 is usual.")
    ratio = probability_ratio(log_prob, old_log_prob)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    worst = torch.maximum(unclipped, clipped)
    bound = -advantages * clip_ratio_c
    losses = torch.where(advantages < 0, torch.minimum(bound, worst), worst)
    metrics = clip_metrics(clipped > unclipped, log_prob, old_log_prob, response_mask)
    metrics["pg_clipfrac_lower"] = token_mean((worst > bound) & (advantages < 0), response_mask)
    return agg(weighted(losses, rollout_is_weights), response_mask), metrics


@zero_without_advantage
def cispo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    agg: Aggregate,
    rollout_is_weights: Tensor | None = None,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
) -> tuple[Tensor, dict[str, Metric]]:
    """CISPO (2506.13585): -sg(clip(r, 1 - low, 1 + high)) A log_prob. Every token keeps its gradient.

    Metrics: pg_clipfrac (the clip acts), ppo_kl.
    """
    ratio = probability_ratio(log_prob, old_log_prob).detach()
    clipped = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    metrics = clip_metrics(clipped != ratio, log_prob, old_log_prob, response_mask)
    return agg(weighted(-clipped * advantages * log_prob, rollout_is_weights), response_mask), metrics


@zero_without_advantage
def gspo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    agg: Aggregate,
    rollout_is_weights: Tensor | None = None,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
) -> tuple[Tensor, dict[str, Metric]]:
    """GSPO-token (2507.18071, eq. 13): PPO's clip on the sequence ratio s = exp(mean_t (lp - lp_old)).

    s has the gradient of each token's lp; its exponent is at most 10.
    Meant for loss_agg_mode seq-mean-token-mean and clips near 3e-4 / 4e-4. Metrics: pg_clipfrac, ppo_kl.
    """
    lengths = response_mask.to(log_prob.dtype).sum(-1).clamp(min=1)
    sequence = (masked_sum(log_prob - old_log_prob, response_mask, -1) / lengths).detach()
    ratio = (log_prob - log_prob.detach() + sequence[:, None]).clamp(max=10.0).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    losses = torch.maximum(unclipped, clipped)
    metrics = clip_metrics(clipped > unclipped, log_prob, old_log_prob, response_mask)
    return agg(weighted(losses, rollout_is_weights), response_mask), metrics


@zero_without_advantage
def geo_mean(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    agg: Aggregate,
    rollout_is_weights: Tensor | None = None,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
) -> tuple[Tensor, dict[str, Metric]]:
    """GMPO (2507.20673): the geometric mean of the clipped token ratios times the sequence's mean advantage.

    l_i = -mean_t(A) exp(mean_t(sgn(A) min(sgn(A) d, sgn(A) clip(d, -low, high)))) with d = lp - lp_old; the clips are
    of the log ratio. The loss is sum_i l_i / number of sequences of the mini-batch, for any loss_agg_mode, so that it does not
    depend on the micro-batch split. Importance weights enter by their geometric mean. Metrics: pg_clipfrac (tokens clipped
    upwards where A > 0), pg_clipfrac_lower (downwards where A < 0), ppo_kl.
    """
    delta = log_prob - old_log_prob
    sign = advantages.sign()
    clipped = delta.clamp(-clip_ratio_low, clip_ratio_high)
    least = sign * torch.minimum(sign * delta, sign * clipped)
    row_losses = -masked_mean(advantages, response_mask, -1) * masked_mean(least, response_mask, -1).exp()
    if rollout_is_weights is not None:
        row_losses = row_losses * masked_mean((rollout_is_weights + 1e-10).log(), response_mask, -1).exp()
    metrics = clip_metrics((delta > clip_ratio_high) & (advantages > 0), log_prob, old_log_prob, response_mask)
    metrics["pg_clipfrac_lower"] = token_mean((delta < -clip_ratio_low) & (advantages < 0), response_mask)
    has_tokens = response_mask.bool().any(-1, keepdim=True)
    return agg(row_losses[:, None], has_tokens, "seq-mean-token-sum"), metrics
