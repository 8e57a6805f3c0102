"""Losses that select tokens: DPPO by divergence, Clip-Cov and KL-Cov by covariance.

DPPO (2602.04879) trains a token while the divergence of its probability from the old policy stays within a bound.

Clip-Cov and KL-Cov (2505.22617) treat differently the few tokens whose log-prob covaries most with the advantage. They
use means over the tokens of their micro-batch, because the mean over a mini-batch is known only after its last
micro-batch. The loss therefore depends on the split: by less than the selected share of tokens (2e-4), but by at least
one token of each micro-batch.
"""

import torch
from torch import Tensor

from verl.algorithms.masked import masked_mean
from verl.algorithms.policy_losses.terms import (
    clip_metrics,
    old_policy_kl,
    probability_ratio,
    weighted,
    zero_without_advantage,
)
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
    """PPO's clipped loss, with max(int(clip_cov_ratio * tokens), 1) tokens set to 0.

    `generator` (on the CPU) samples them among those with clip_cov_lb < cov < clip_cov_ub where the clip does not act.
    Metrics: pg_clipfrac (tokens set to 0), ppo_kl.
    """
    ratio = probability_ratio(log_prob, old_log_prob)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    cov = _covariance(advantages, log_prob, response_mask)
    eligible = (cov > clip_cov_lb) & (cov < clip_cov_ub) & response_mask.bool() & ~(clipped > unclipped)
    candidates = eligible.flatten().nonzero().flatten()
    quota = max(int(clip_cov_ratio * int(response_mask.sum())), 1)
    sampled = torch.randperm(len(candidates), generator=generator)[:quota].to(candidates.device)
    dropped = torch.zeros_like(eligible).flatten().index_fill_(0, candidates[sampled], True).view_as(eligible)
    losses = torch.where(dropped, 0.0, torch.maximum(unclipped, clipped))
    metrics = clip_metrics(dropped, log_prob, old_log_prob, response_mask)
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

    Metrics: ppo_kl.
    """
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


@zero_without_advantage
def dppo_tv(
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
    """-A sg(min(r, c)) log_prob M; M keeps a token while p - p_old <= high (A > 0) or >= -low (otherwise).

    The clip ratios are bounds on total variation here. Metrics: pg_clipfrac (tokens dropped), ppo_kl.
    """
    shift = (log_prob.exp() - old_log_prob.exp()).detach()
    inside = torch.where(advantages > 0, shift <= clip_ratio_high, shift >= -clip_ratio_low)
    return _selected_loss(
        old_log_prob, log_prob, advantages, response_mask, agg, rollout_is_weights, inside=inside, ceiling=clip_ratio_c
    )


@zero_without_advantage
def dppo_kl(
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
    """dppo_tv with a bound on the binary KL instead of total variation.

    M keeps a token while p_o (lp_o - lp) + (1 - p_o) log((1 - p_o + 1e-8) / (1 - p + 1e-8)) is at most high (A > 0) or low
    (otherwise), or while p is not above p_old (A > 0) or not below it (otherwise). Metrics: pg_clipfrac (tokens dropped),
    ppo_kl.
    """
    new, p, p_old = log_prob.detach(), log_prob.detach().exp(), old_log_prob.exp()
    kl = p_old * (old_log_prob - new) + (1 - p_old) * ((1 - p_old + 1e-8) / (1 - p + 1e-8)).log()
    up = (kl <= clip_ratio_high) | (p <= p_old)
    down = (kl <= clip_ratio_low) | (p >= p_old)
    inside = torch.where(advantages > 0, up, down)
    return _selected_loss(
        old_log_prob, log_prob, advantages, response_mask, agg, rollout_is_weights, inside=inside, ceiling=clip_ratio_c
    )


def _selected_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    agg: Aggregate,
    rollout_is_weights: Tensor | None,
    *,
    inside: Tensor,
    ceiling: float,
) -> tuple[Tensor, dict[str, Metric]]:
    ratio = probability_ratio(log_prob, old_log_prob).detach().clamp(max=ceiling)
    losses = torch.where(inside, -advantages * ratio * log_prob, 0.0)
    metrics = clip_metrics(~inside, log_prob, old_log_prob, response_mask)
    return agg(weighted(losses, rollout_is_weights), response_mask), metrics
