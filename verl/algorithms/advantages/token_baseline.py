"""The optimal token baseline: for each group and position, the baseline that minimises the variance of the gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.algorithms.advantages.returns import reward_to_go, settle_rewards
from verl.algorithms.groups import Groups


def optimal_token_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    index: Any,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
) -> tuple[Tensor, Tensor]:
    """A_t = G_t - b_t with b_t = sum_j G_{j,t} W_{j,t} / (sum_j W_{j,t} + 1e-8) over the group's rows that train
    position t.

    G is the reward to go; W_t = sum_{s<=t} w_s is the accumulated squared norm of the score function, from
    w_s = 1 - 2 pi_s + sum_v pi_v^2 (times the squared importance weight), pi_s = exp(old_log_probs). Where one row
    alone reaches a position, its baseline would be its own return: with `handle_zero_tail` b = 0 there, else A = 0. A
    row alone in its group has b = 0. `sum_pi_squared` [batch, response] comes with the old log-probs.
    Returns (A, G).
    """
    mask = response_mask.to(token_level_rewards.dtype)
    groups = Groups.of(index, token_level_rewards)
    returns = reward_to_go(token_level_rewards, response_mask)
    energy = 1.0 - 2.0 * old_log_probs.exp() + sum_pi_squared
    if rollout_is_weights is not None:
        energy = energy * rollout_is_weights.square()
    accumulated = torch.where(mask.bool(), energy, 0.0).cumsum(1) * mask
    baseline = groups.sum(returns * accumulated) / (groups.sum(accumulated) + 1e-8)
    unshared = groups.alone[:, None].expand_as(mask)
    if handle_zero_tail:
        unshared = unshared | (groups.sum(mask)[groups.ids] < 2)
    row_baseline = torch.where(unshared, 0.0, baseline[groups.ids])
    return (returns - row_baseline) * mask, returns


def tir_optimal_token_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    index: Any,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
) -> tuple[Tensor, Tensor]:
    """`optimal_token_baseline` for responses with tool output: position t of a row is its t-th trained token, so that
    rows of one group line up however long the tool output between them is."""
    order = torch.argsort(response_mask.bool().logical_not().to(torch.uint8), dim=1, stable=True)

    def compact(x: Tensor) -> Tensor:
        return x.gather(1, order)

    settled = settle_rewards(token_level_rewards, response_mask)
    found = optimal_token_baseline(
        compact(settled),
        compact(response_mask),
        index=index,
        old_log_probs=compact(old_log_probs),
        sum_pi_squared=compact(sum_pi_squared),
        rollout_is_weights=None if rollout_is_weights is None else compact(rollout_is_weights),
        handle_zero_tail=handle_zero_tail,
    )
    advantages, returns = (torch.zeros_like(x).scatter_(1, order, x) for x in found)
    return advantages, returns
