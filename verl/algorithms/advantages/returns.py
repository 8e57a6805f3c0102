"""Estimators from the rewards that follow a token: GAE, REINFORCE++, ReMax, optimal token baselines."""

import torch
from torch import Tensor

from verl.algorithms.groups import RowGroups
from verl.algorithms.masked import masked_whiten


def move_rewards_to_trained_tokens(token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Move each reward on a token that does not train to the last trained token before it. [batch, response]

    An example is the score on tool output that ends a response.
    """
    positions = torch.arange(response_mask.shape[1], device=response_mask.device)
    last_trained = torch.where(response_mask.bool(), positions, -1).cummax(dim=1).values
    reachable = torch.where(last_trained >= 0, token_level_rewards, 0.0)
    return torch.zeros_like(token_level_rewards).scatter_add_(1, last_trained.clamp(min=0), reachable)


def reward_to_go(token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Sum of the rewards from token t on, 0 outside the mask. [batch, response]"""
    rewards = move_rewards_to_trained_tokens(token_level_rewards, response_mask)
    return torch.where(response_mask.bool(), rewards.flip(1).cumsum(1).flip(1), 0.0)


def gae(
    token_level_rewards: Tensor, response_mask: Tensor, *, values: Tensor, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (1506.02438), whitened over the batch.

    delta_t = r_t + gamma V' - V_t,  L_t = delta_t + gamma lam L',  return_t = L_t + V_t, where V' and L' belong to
    the next trained token: observation tokens are skipped. The returns are not whitened.
    """
    rewards = move_rewards_to_trained_tokens(token_level_rewards, response_mask)
    mask = response_mask.bool()
    raw = torch.zeros_like(rewards)
    carried_value = carried_advantage = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * carried_value - values[:, t]
        raw[:, t] = torch.where(mask[:, t], delta + gamma * lam * carried_advantage, carried_advantage)
        carried_advantage = raw[:, t]
        carried_value = torch.where(mask[:, t], values[:, t], carried_value)
    return masked_whiten(raw, mask), torch.where(mask, raw + values, 0.0)


def reinforce_plus_plus(
    token_level_rewards: Tensor, response_mask: Tensor, *, gamma: float = 1.0
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (2501.03262): discounted return of each token, observation tokens skipped, whitened over the batch."""
    rewards = move_rewards_to_trained_tokens(token_level_rewards, response_mask)
    mask = response_mask.bool()
    returns = torch.zeros_like(rewards)
    carried = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        carried = torch.where(mask[:, t], rewards[:, t] + gamma * carried, carried)
        returns[:, t] = carried
    returns = torch.where(mask, returns, 0.0)
    return masked_whiten(returns, mask), returns


def remax(token_level_rewards: Tensor, response_mask: Tensor, *, reward_baselines: Tensor) -> tuple[Tensor, Tensor]:
    """ReMax (2310.10505): reward to go minus the reward of the prompt's greedy response, `reward_baselines` [batch]."""
    returns = reward_to_go(token_level_rewards, response_mask)
    return torch.where(response_mask.bool(), returns - reward_baselines[:, None], 0.0), returns


def optimal_token_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    index: object,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
) -> tuple[Tensor, Tensor]:
    """Optimal token baseline: the baseline of a group and position that minimizes the variance of the gradient.

    A_t = G_t - b_t with b_t = sum_j G_{j,t} W_{j,t} / (sum_j W_{j,t} + 1e-8) over the group's rows that train position t.
    G is the reward to go; W_t = sum_{s<=t} w_s is the accumulated squared norm of the score function, from
    w_s = 1 - 2 pi_s + sum_v pi_v^2 (times the squared importance weight), pi_s = exp(old_log_probs). If only one row reaches a
    position, its baseline would be its return: with `handle_zero_tail` b = 0 there, else A = 0. The row of a group of one has b
    = 0. `sum_pi_squared` [batch, response] is computed with the old log-probs. Returns (A, G).
    """
    mask = response_mask.to(token_level_rewards.dtype)
    groups = RowGroups.of(index, token_level_rewards)
    returns = reward_to_go(token_level_rewards, response_mask)
    energy = 1.0 - 2.0 * old_log_probs.exp() + sum_pi_squared
    if rollout_is_weights is not None:
        energy = energy * rollout_is_weights.square()
    accumulated = torch.where(mask.bool(), energy, 0.0).cumsum(1) * mask
    baseline = groups.sum(returns * accumulated) / (groups.sum(accumulated) + 1e-8)
    unshared = groups.is_single[:, None].expand_as(mask)
    if handle_zero_tail:
        unshared = unshared | (groups.sum(mask)[groups.ids] < 2)
    row_baseline = torch.where(unshared, 0.0, baseline[groups.ids])
    return (returns - row_baseline) * mask, returns


def tir_optimal_token_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    index: object,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
) -> tuple[Tensor, Tensor]:
    """`optimal_token_baseline` for responses with tool output: position t of a row is its t-th trained token."""
    order = torch.argsort(response_mask.bool().logical_not().to(torch.uint8), dim=1, stable=True)

    def compact(x: Tensor) -> Tensor:
        return x.gather(1, order)

    rewards = move_rewards_to_trained_tokens(token_level_rewards, response_mask)
    compacted = optimal_token_baseline(
        compact(rewards),
        compact(response_mask),
        index=index,
        old_log_probs=compact(old_log_probs),
        sum_pi_squared=compact(sum_pi_squared),
        rollout_is_weights=None if rollout_is_weights is None else compact(rollout_is_weights),
        handle_zero_tail=handle_zero_tail,
    )
    advantages, returns = (torch.zeros_like(x).scatter_(1, order, x) for x in compacted)
    return advantages, returns
