"""Estimators built on what follows a token: GAE, REINFORCE++, ReMax."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.masked import masked_whiten


def settle_rewards(token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Rewards on trained tokens only: one that lies on a token that does not train (a score on tool output that ends a
    response) moves to the last trained token before it. [batch, response]; nothing moves when there is no such
    reward."""
    positions = torch.arange(response_mask.shape[1], device=response_mask.device)
    last_trained = torch.where(response_mask.bool(), positions, -1).cummax(dim=1).values
    reachable = torch.where(last_trained >= 0, token_level_rewards, 0.0)
    return torch.zeros_like(token_level_rewards).scatter_add_(1, last_trained.clamp(min=0), reachable)


def reward_to_go(token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """sum of the rewards from token t on, 0 outside the mask. [batch, response]"""
    settled = settle_rewards(token_level_rewards, response_mask)
    return torch.where(response_mask.bool(), settled.flip(1).cumsum(1).flip(1), 0.0)


def gae(
    token_level_rewards: Tensor, response_mask: Tensor, *, values: Tensor, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (1506.02438), whitened over the batch.

    delta_t = r_t + gamma V' - V_t,  L_t = delta_t + gamma lam L',  return_t = L_t + V_t, where V' and L' are those of
    the next trained token: observation tokens are stepped over. The returns are taken before whitening.
    """
    rewards = settle_rewards(token_level_rewards, response_mask)
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
    """REINFORCE++ (2501.03262): discounted return of each token, stepping over observation tokens; advantages are the
    returns whitened over the batch."""
    rewards = settle_rewards(token_level_rewards, response_mask)
    mask = response_mask.bool()
    returns = torch.zeros_like(rewards)
    carried = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        carried = torch.where(mask[:, t], rewards[:, t] + gamma * carried, carried)
        returns[:, t] = carried
    returns = torch.where(mask, returns, 0.0)
    return masked_whiten(returns, mask), returns


def remax(token_level_rewards: Tensor, response_mask: Tensor, *, reward_baselines: Tensor) -> tuple[Tensor, Tensor]:
    """ReMax (2310.10505): reward to go less the reward of the prompt's greedy response, `reward_baselines` [batch]."""
    returns = reward_to_go(token_level_rewards, response_mask)
    return torch.where(response_mask.bool(), returns - reward_baselines[:, None], 0.0), returns
