"""Selection of the rows that train: DAPO's group filter, PF-PPO's resampling, the best of a group, pairs of a group."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from verl.algorithms.groups import RowGroups
from verl.errors import ConfigError


def filter_groups(
    metric_values: Tensor | Sequence[float], uids: object, is_scored: Tensor | Sequence[bool] | None = None
) -> Tensor:
    """Rows to keep, [batch] bool: a group of two or more rows with one and the same metric is dropped.

    Such a group has no gradient (dynamic sampling of DAPO, 2503.14476). Rows that are not `is_scored` [batch] have no metric.
    """
    values = torch.as_tensor(metric_values, dtype=torch.float64).flatten()
    scored = torch.ones_like(values, dtype=torch.bool) if is_scored is None else torch.as_tensor(is_scored)
    groups = RowGroups.of(uids, values)
    highest = groups.max(torch.where(scored, values, -torch.inf))
    lowest = groups.min(torch.where(scored, values, torch.inf))
    constant = highest == lowest  # exact; a standard deviation may be rounding noise
    unscored = highest < lowest
    return ~((constant & (groups.sizes > 1)) | unscored)[groups.ids]


def pf_ppo_indices(
    scores: Tensor,
    method: str = "pow",
    weight_pow: float = 2.0,
    generator: torch.Generator | None = None,
    is_scored: Tensor | None = None,
) -> Tensor:
    """Row indices [batch], sampled with replacement with a weight from each row's score [batch] (PF-PPO, 2409.06957).

    pow: |s|^weight_pow.  max_min: 1 for the largest and smallest score of the batch, else 0.  max_random: 0.4 for the
    largest, else 0.1. If all weights are 0, every row is equally likely. Rows that are not `is_scored` [batch] have the weight
    0. Raises ConfigError on another method.
    """
    scores = scores.detach().double().cpu()
    scored = torch.ones_like(scores, dtype=torch.bool) if is_scored is None else is_scored.cpu()
    largest, smallest = scores[scored].max(), scores[scored].min()
    if method == "pow":
        weights = scores.abs() ** weight_pow
    elif method == "max_min":
        weights = ((scores == largest) | (scores == smallest)).double()
    elif method == "max_random":
        weights = torch.where(scores == largest, 0.4, 0.1).double()
    else:
        raise ConfigError(
            f"There is no algorithm.pf_ppo.reweight_method {method!r}; there are pow, max_min, max_random."
        )
    weights = torch.where(scored, weights, 0.0)
    if not bool(weights.sum() > 0):
        weights = scored.double()
    return torch.multinomial(weights, len(scores), replacement=True, generator=generator)


def best_of_groups(
    scores: Sequence[float],
    uids: Sequence[Hashable],
    *,
    keep: int = 1,
    min_score: float | None = None,
    contents: Sequence[Hashable] | None = None,
    allowed: Sequence[bool] | None = None,
) -> list[int]:
    """Rows of rejection sampling, ascending: the `keep` rows of each group with the highest scores, the earlier of equals.

    Only rows that are `allowed` (default: all) and score at least `min_score` count, and of rows of a group with equal
    `contents` one. A group may keep fewer rows, or none (RAFT, 2304.06767, algorithm 1; Llama 2, 2307.09288, section 3.2.3).
    """
    best_rows: dict[Hashable, dict[Hashable, int]] = {}  # group -> content -> row
    for row in sorted(range(len(scores)), key=lambda row: (-scores[row], row)):
        rows = best_rows.setdefault(uids[row], {})
        counts = (allowed is None or allowed[row]) and (min_score is None or scores[row] >= min_score)
        if counts and len(rows) < keep:
            rows.setdefault(row if contents is None else contents[row], row)
    return sorted(row for rows in best_rows.values() for row in rows.values())


def best_and_worst(
    scores: Sequence[float], uids: Sequence[Hashable], is_scored: Sequence[bool] | None = None
) -> list[tuple[int, int]]:
    """The row with the highest and that with the lowest score of each group, the earlier of equals, in order of the groups'
    first rows. A group of equal scores has no pair. Rows that are not `is_scored` do not count."""
    groups: dict[Hashable, list[int]] = {}
    for row, uid in enumerate(uids):
        if is_scored is None or is_scored[row]:
            groups.setdefault(uid, []).append(row)
    pairs = [
        (max(rows, key=lambda row: scores[row]), min(rows, key=lambda row: scores[row])) for rows in groups.values()
    ]
    return [(best, worst) for best, worst in pairs if scores[best] > scores[worst]]
