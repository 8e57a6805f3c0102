"""Losses on a clipped probability ratio: PPO with dual clip, CISPO."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.masked import token_mean
from verl.algorithms.policy_losses.terms import old_policy_kl, probability_ratio, weighted, zero_without_advantage
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
    metrics = {
        "pg_clipfrac": token_mean(clipped > unclipped, response_mask),
        "ppo_kl": old_policy_kl(log_prob, old_log_prob, response_mask),
        "pg_clipfrac_lower": token_mean((worst > bound) & (advantages < 0), response_mask),
    }
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
    """CISPO (2506.13585): -sg(clip(r, 1 - low, 1 + high)) A log_prob. The weight is clipped, no token loses its
    gradient. Metrics: pg_clipfrac (the clip acts), ppo_kl."""
    ratio = probability_ratio(log_prob, old_log_prob).detach()
    clipped = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    metrics = {
        "pg_clipfrac": token_mean(clipped != ratio, response_mask),
        "ppo_kl": old_policy_kl(log_prob, old_log_prob, response_mask),
    }
    return agg(weighted(-clipped * advantages * log_prob, rollout_is_weights), response_mask), metrics
