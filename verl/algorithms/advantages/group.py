"""Estimators that compare the samples of one prompt.

R_i is the sum of row i's rewards; mu, sigma (unbiased) and G are mean, standard deviation and size of its group. Each
trained token of a row gets the row's scalar. `index` [batch] has the group of each row. Returns equal advantages.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.groups import RowGroups
from verl.algorithms.masked import broadcast_true, masked_whiten
from verl.errors import ConfigError


def _on_tokens(rows: Tensor, response_mask: Tensor, *, whitens: bool = False) -> tuple[Tensor, Tensor]:
    """The scalars of `rows` on their trained tokens, as advantages and as returns."""
    advantages = broadcast_true(response_mask.bool(), rows)
    if whitens:
        advantages = masked_whiten(advantages, response_mask)
    return advantages, advantages


def _normalized(scores: Tensor, groups: RowGroups, by_std: bool, epsilon: float) -> Tensor:
    centered = groups.minus_mean(scores)
    return centered / (groups.std(scores) + epsilon) if by_std else centered


def grpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    index: object,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """GRPO (2402.03300): (R_i - mu) / (sigma + epsilon); without the division it is Dr. GRPO (2503.20783).

    A group of one has mu = 0 and sigma = 1.
    """
    scores = token_level_rewards.sum(-1)
    rows = _normalized(scores, RowGroups.of(index, scores), norm_adv_by_std_in_grpo, epsilon)
    return _on_tokens(rows, response_mask)


def gdpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    index: object,
    reward_parts: Mapping[str, Tensor] | Sequence[Mapping[str, object]],
    gdpo_reward_keys: Sequence[str] | None = None,
    gdpo_reward_weights: Sequence[float] | None = None,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """GDPO (2601.05242): GRPO on each part of the reward by itself, their weighted sum whitened over the batch.

    `reward_parts` is part name -> [batch], or the result of the reward function for each row; the part "score" is the full
    reward if the function returns no parts. Weights default to 1. Raises ConfigError when a part is missing or not a number.
    """
    scores = token_level_rewards.sum(-1)
    parts = _reward_columns(reward_parts, gdpo_reward_keys, scores)
    weights = [1.0] * len(parts) if gdpo_reward_weights is None else [float(w) for w in gdpo_reward_weights]
    if len(weights) != len(parts):
        raise ConfigError(
            f"algorithm.gdpo_reward_weights has {len(weights)} numbers, algorithm.gdpo_reward_keys {len(parts)} names; "
            "give one weight for each name."
        )
    groups = RowGroups.of(index, scores)
    total = torch.zeros_like(scores)
    for weight, part in zip(weights, parts, strict=True):
        total = total + weight * _normalized(part, groups, norm_adv_by_std_in_grpo, epsilon)
    return _on_tokens(total, response_mask, whitens=True)


def _reward_columns(
    parts: Mapping[str, Tensor] | Sequence[Mapping[str, object]], keys: Sequence[str] | None, scores: Tensor
) -> list[Tensor]:
    if isinstance(parts, Mapping):
        missing = [k for k in keys or () if k not in parts]
        if missing or not (keys or parts):
            raise ConfigError(f"gdpo needs the reward parts {missing or '(none given)'}; there are {sorted(parts)}.")
        return [parts[k].to(scores) for k in keys or parts]
    if not keys:
        raise ConfigError("gdpo needs algorithm.gdpo_reward_keys: the names of the reward parts that it normalises.")
    columns = []
    for key in keys:
        column = scores.clone() if key == "score" else torch.zeros_like(scores)
        for i, row in enumerate(parts):
            if key == "score" and key not in row:
                continue
            column[i] = _number(row, key)
        columns.append(column)
    return columns


def _number(row: Mapping[str, Any], key: str) -> float:
    try:
        return float(row[key])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"gdpo reads the reward part '{key}' (algorithm.gdpo_reward_keys), but a reward function returned "
            f"{dict(row)!r}; return a number under that name for each sample."
        ) from error


def grpo_passk(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    index: object,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Pass@k training (2503.19595): the best sample of a group gets (R_max - R_second) [/ (sigma + epsilon)], every other
    sample 0. A sample without another has advantage 0; raises ConfigError when no group has two."""
    scores = token_level_rewards.sum(-1)
    groups = RowGroups.of(index, scores)
    if bool(groups.is_single.all()):
        raise ConfigError(
            "grpo_passk compares the two best samples of a prompt; set actor_rollout_ref.rollout.n to 2 or more."
        )
    rows = torch.arange(len(scores), device=scores.device)
    is_max = scores == groups.max(scores)[groups.ids]
    first_max = groups.min(torch.where(is_max, rows, len(scores)).double())[groups.ids] == rows
    second = groups.max(torch.where(first_max, float("-inf"), scores))[groups.ids]
    gap = scores - second
    if norm_adv_by_std_in_grpo:
        gap = gap / (groups.std(scores) + epsilon)
    return _on_tokens(torch.where(first_max & ~groups.is_single, gap, 0.0), response_mask)


def reinforce_plus_plus_baseline(
    token_level_rewards: Tensor, response_mask: Tensor, *, index: object
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ with a group baseline (2501.03262): R_i - mu (R_i in a group of one), whitened over the tokens."""
    scores = token_level_rewards.sum(-1)
    centered = RowGroups.of(index, scores).minus_mean(scores)
    return _on_tokens(centered, response_mask, whitens=True)


def rloo(token_level_rewards: Tensor, response_mask: Tensor, *, index: object) -> tuple[Tensor, Tensor]:
    """Leave-one-out (2402.14740): (R_i - mu) G / (G - 1): R_i minus the mean of the other rewards.

    A group of one keeps R_i (baseline 0), as `rloo` and as `rloo_vectorized`.
    """
    scores = token_level_rewards.sum(-1)
    groups = RowGroups.of(index, scores)
    sizes = groups.sizes[groups.ids]
    leave_one_out = groups.minus_mean(scores) * sizes / (sizes - 1).clamp(min=1)
    return _on_tokens(leave_one_out, response_mask)


def opo(token_level_rewards: Tensor, response_mask: Tensor, *, index: object) -> tuple[Tensor, Tensor]:
    """On-policy RL with the optimal reward baseline (2505.23585): R_i - sum_j len_j R_j / sum_j len_j over the group.

    len is the number of trained tokens; a group of one keeps R_i.
    """
    scores = token_level_rewards.sum(-1)
    groups = RowGroups.of(index, scores)
    lengths = response_mask.to(scores.dtype).sum(-1)
    baseline = groups.sum(lengths * scores) / groups.sum(lengths).clamp(min=1)
    return _on_tokens(torch.where(groups.is_single, scores, scores - baseline[groups.ids]), response_mask)


def gpg(
    token_level_rewards: Tensor, response_mask: Tensor, *, index: object, f_norm: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Group policy gradient (2504.02546): alpha (R_i - mu) / f_norm with alpha = batch / max(1, number of nonzero rewards),
    both over the rows with a trained token.

    A group of one has mu = 0.
    """
    scores, trains = token_level_rewards.sum(-1), response_mask.bool().any(-1)
    alpha = trains.sum() / torch.count_nonzero(scores[trains]).clamp(min=1).to(scores.dtype)
    return _on_tokens(alpha * RowGroups.of(index, scores).minus_mean(scores) / f_norm, response_mask)
