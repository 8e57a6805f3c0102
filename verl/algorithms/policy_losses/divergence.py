"""DPPO (2602.04879): a token trains while the divergence of its probability from the old policy stays within a
bound."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.masked import token_mean
from verl.algorithms.policy_losses.terms import old_policy_kl, probability_ratio, weighted, zero_without_advantage
from verl.algorithms.reduce import Aggregate
from verl.data_proto.metrics import Metric


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

    The clip ratios are bounds on total variation here. Metrics: pg_clipfrac (tokens left out), ppo_kl.
    """
    shift = (log_prob.exp() - old_log_prob.exp()).detach()
    inside = torch.where(advantages > 0, shift <= clip_ratio_high, shift >= -clip_ratio_low)
    return _loss(
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
    """As dppo_tv, but M keeps a token while the binary KL p_o (lp_o - lp) + (1 - p_o) log((1 - p_o + 1e-8) / (1 - p +
    1e-8)) is at most high (A > 0) or low (otherwise), or while p lies on the safe side of p_old (not above it where A
    > 0, not below it otherwise). Metrics: pg_clipfrac (tokens left out), ppo_kl."""
    new, p, p_old = log_prob.detach(), log_prob.detach().exp(), old_log_prob.exp()
    kl = p_old * (old_log_prob - new) + (1 - p_old) * ((1 - p_old + 1e-8) / (1 - p + 1e-8)).log()
    up = (kl <= clip_ratio_high) | (p <= p_old)
    down = (kl <= clip_ratio_low) | (p >= p_old)
    inside = torch.where(advantages > 0, up, down)
    return _loss(
        old_log_prob, log_prob, advantages, response_mask, agg, rollout_is_weights, inside=inside, ceiling=clip_ratio_c
    )


def _loss(
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
    metrics = {
        "pg_clipfrac": token_mean(~inside, response_mask),
        "ppo_kl": old_policy_kl(log_prob, old_log_prob, response_mask),
    }
    return agg(weighted(losses, rollout_is_weights), response_mask), metrics
