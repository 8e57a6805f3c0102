"""Clip-Cov and KL-Cov (2505.22617): treat apart the few tokens whose log-prob covaries most with the advantage.

Both select tokens by statistics over the tokens that they are given: the means of advantages and of current
log-probs, and a number of tokens. The mean of the current log-probs of a mini-batch is known only when its last
micro-batch has been computed, so the selection is made in each micro-batch for itself, and the loss depends on the
split: by less than the selected share of tokens (2e-4), but at least one token for each micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.masked import masked_mean, token_mean
from verl.algorithms.policy_losses.terms import old_policy_kl, probability_ratio, weighted
from verl.algorithms.reduce import Aggregate
from verl.data_proto.metrics import Metric


def _covariance(advantages: Tensor, log_prob: Tensor, response_mask: Tensor) -> Tensor:
    fresh = log_prob.detach()
    return (advantages - masked_mean(advantages, response_mask)) * (fresh - masked_mean(fresh, response_mask))


def clip_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    agg: Aggregate,
    rollout_is_weights: Tensor | None = None,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_cov_ratio: float = 2e-4,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, dict[str, Metric]]:
    """PPO's clipped loss, with max(int(clip_cov_ratio * tokens), 1) tokens set to 0: drawn by `generator` (on the
    CPU) among those with clip_cov_lb < cov < clip_cov_ub that the clip has not taken already. Metrics: pg_clipfrac
    (tokens set to 0), ppo_kl."""
    ratio = probability_ratio(log_prob, old_log_prob)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    cov = _covariance(advantages, log_prob, response_mask)
    eligible = (cov > clip_cov_lb) & (cov < clip_cov_ub) & response_mask.bool() & ~(clipped > unclipped)
    candidates = eligible.flatten().nonzero().flatten()
    quota = max(int(clip_cov_ratio * int(response_mask.sum())), 1)
    drawn = torch.randperm(len(candidates), generator=generator)[:quota].to(candidates.device)
    dropped = torch.zeros_like(eligible).flatten().index_fill_(0, candidates[drawn], True).view_as(eligible)
    losses = torch.where(dropped, 0.0, torch.maximum(unclipped, clipped))
    metrics = {
        "pg_clipfrac": token_mean(dropped, response_mask),
        "ppo_kl": old_policy_kl(log_prob, old_log_prob, response_mask),
    }
    return agg(weighted(losses, rollout_is_weights), response_mask), metrics


def kl_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    agg: Aggregate,
    rollout_is_weights: Tensor | None = None,
    kl_cov_ratio: float = 2e-4,
    ppo_kl_coef: float = 0.1,
) -> tuple[Tensor, dict[str, Metric]]:
    """-A r, plus ppo_kl_coef |lp - lp_old| on the max(1, int(kl_cov_ratio * tokens)) tokens of largest covariance.
    Metrics: ppo_kl."""
    delta = log_prob - old_log_prob
    losses = -advantages * probability_ratio(log_prob, old_log_prob)
    num_tokens = int(response_mask.sum())
    if num_tokens > 0:
        cov = torch.where(response_mask.bool(), _covariance(advantages, log_prob, response_mask), float("-inf"))
        top = cov.flatten().topk(max(1, int(kl_cov_ratio * num_tokens))).indices
        chosen = torch.zeros_like(cov).flatten().index_fill_(0, top, 1.0).view_as(cov)
        losses = losses + ppo_kl_coef * delta.abs() * chosen
    metrics = {"ppo_kl": old_policy_kl(log_prob, old_log_prob, response_mask)}
    return agg(weighted(losses, rollout_is_weights), response_mask), metrics
