"""Estimators of episodes: the turn is the action, and all tokens of a turn have its advantage.

`turn_ids` [batch, response] numbers the turns of a row from 0, and is -1 on tokens that were not sampled. r_k is the sum of the
rewards of turn k, those on tool output behind it included; G_k = r_k + gamma G_{k+1} is its return.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from verl.algorithms.advantages.group import grpo
from verl.algorithms.advantages.returns import move_rewards_to_trained_tokens
from verl.algorithms.groups import RowGroups, labels_of
from verl.algorithms.masked import masked_whiten


def turn_numbers(response_mask: Tensor) -> Tensor:
    """int64 [batch, response]: the number of the turn, a run of trained tokens, of each token; -1 on every other token."""
    mask = response_mask.bool()
    before = torch.nn.functional.pad(mask[:, :-1], (1, 0))
    return torch.where(mask, (mask & ~before).cumsum(1) - 1, -1)


def turn_gae(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    turn_ids: Tensor,
    values: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """GAE over turns (Turn-PPO, 2512.17008), whitened over the tokens of the batch.

    delta_k = r_k + gamma V_{k+1} - V_k,  L_k = delta_k + gamma lam L_{k+1},  return_k = L_k + V_k, where V_k is the value
    before the first token of turn k. `gamma` and `lam` count turns and not tokens. The returns are not whitened.
    """
    rewards, is_first = _turn_rewards(token_level_rewards, turn_ids), _first_tokens(turn_ids)
    before = _per_turn(torch.where(is_first, values, 0.0), turn_ids)
    raw, following = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    value = torch.zeros_like(following)
    for k in reversed(range(rewards.shape[1])):
        following = rewards[:, k] + gamma * value - before[:, k] + gamma * lam * following
        raw[:, k], value = following, before[:, k]
    advantages = masked_whiten(_to_tokens(raw, turn_ids, response_mask), response_mask)
    return advantages, _to_tokens(raw + before, turn_ids, response_mask)


def turn_grpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    index: object,
    turn_ids: Tensor,
    gamma: float = 1.0,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """GRPO of each turn: G_k against the returns of turn k of the group's other samples, (G_k - mu_k) / (sigma_k + epsilon).

    A turn that only one sample of the group has reached has advantage 0. With one turn, it is GRPO.
    """
    returns = _turn_returns(token_level_rewards, turn_ids, gamma)
    labels = [[(group, k) for k in range(returns.shape[1])] for group in labels_of(index)]
    relative = _compared(returns, turn_ids, labels, norm_adv_by_std_in_grpo, epsilon)
    advantages = _to_tokens(relative, turn_ids, response_mask)
    return advantages, advantages


def gigpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    index: object,
    turn_ids: Tensor,
    responses: Tensor,
    gamma: float = 1.0,
    step_advantage_w: float = 1.0,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """GiGPO (2505.10978): GRPO's advantage of the episode, plus `step_advantage_w` times the turn's advantage.

    The turn's advantage compares G_k with the returns of all turns of the group that followed the same state: the same tokens
    of a tool or an environment (`responses` between two turns), or the prompt. It is 0 if no other turn followed that state.
    """
    returns = _turn_returns(token_level_rewards, turn_ids, gamma)
    by_turn = _compared(returns, turn_ids, _states(responses, turn_ids, index), norm_adv_by_std_in_grpo, epsilon)
    episode, _ = grpo(
        token_level_rewards,
        response_mask,
        index=index,
        norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
        epsilon=epsilon,
    )
    advantages = episode + step_advantage_w * _to_tokens(by_turn, turn_ids, response_mask)
    return advantages, advantages


def _per_turn(values: Tensor, turn_ids: Tensor) -> Tensor:
    """Sums of `values` over the tokens of each turn, [batch, turns]; 0 for turns that a row does not have."""
    num_turns = max(1, int(turn_ids.max()) + 1)
    turn_values = torch.where(turn_ids >= 0, values, 0.0)
    return values.new_zeros(len(values), num_turns).scatter_add_(1, turn_ids.clamp(min=0), turn_values)


def _turn_rewards(token_level_rewards: Tensor, turn_ids: Tensor) -> Tensor:
    return _per_turn(move_rewards_to_trained_tokens(token_level_rewards, turn_ids >= 0), turn_ids)


def _first_tokens(turn_ids: Tensor) -> Tensor:
    before = torch.nn.functional.pad(turn_ids[:, :-1].cummax(1).values, (1, 0), value=-1)
    return turn_ids > before


def _turn_returns(token_level_rewards: Tensor, turn_ids: Tensor, gamma: float) -> Tensor:
    returns = _turn_rewards(token_level_rewards, turn_ids)
    for k in reversed(range(returns.shape[1] - 1)):
        returns[:, k] += gamma * returns[:, k + 1]
    return returns


def _to_tokens(per_turn: Tensor, turn_ids: Tensor, response_mask: Tensor) -> Tensor:
    return torch.where(response_mask.bool(), per_turn.gather(1, turn_ids.clamp(min=0)), 0.0)


def _compared(
    turn_values: Tensor, turn_ids: Tensor, labels: Sequence[Sequence[object]], by_std: bool, epsilon: float
) -> Tensor:
    """(x - mean) [/ (std + epsilon)] of `turn_values` [batch, turns] among the turns with equal labels; 0 for a single one."""
    num_turns = (turn_ids.max(1).values + 1).tolist()
    rows = [row for row, count in enumerate(num_turns) for _ in range(count)]
    numbers = [k for count in num_turns for k in range(count)]
    values = turn_values[rows, numbers]
    groups = RowGroups.of([labels[row][k] for row, k in zip(rows, numbers, strict=True)], values)
    centered = groups.minus_mean(values)
    if by_std:
        centered = centered / (groups.std(values) + epsilon)
    relative = torch.zeros_like(turn_values)
    relative[rows, numbers] = torch.where(groups.is_single, 0.0, centered)
    return relative


def _states(responses: Tensor, turn_ids: Tensor, index: object) -> list[list[object]]:
    """For each row and turn a label of its group and of the tokens since the turn before it."""
    states: list[list[object]] = []
    for group, tokens, numbers in zip(labels_of(index), responses.tolist(), turn_ids.tolist(), strict=True):
        labels: list[object] = []
        between: list[int] = []
        for token, number in zip(tokens, numbers, strict=True):
            if number == len(labels):
                labels.append((group, tuple(between) if labels else None))
            between = [] if number >= 0 else [*between, token]
        states.append(labels)
    return states
