"""Groups of rows that share a prompt, and their statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def labels_of(index: Sequence[Any] | Any) -> list[object]:
    """The labels of groups in a list, an array or a tensor, as Python's own values."""
    return index.tolist() if hasattr(index, "tolist") else list(index)


def without_missing(labels: Sequence[object] | object, is_scored: Sequence[bool] | object) -> list[object]:
    """Labels that put each row without a score into a separate group, outside the statistics of its group."""
    return [
        label if has_score else ("missing", row)
        for row, (label, has_score) in enumerate(zip(labels_of(labels), labels_of(is_scored), strict=True))
    ]


def by_player(labels: Sequence[Any] | object, extras: Sequence[dict[str, Any]] | Any) -> list[object]:
    """Labels that group rows with a `player` only with rows of the same player: the seats of a game differ in the possible
    rewards."""
    pairs = zip(labels_of(labels), (extra.get("player") for extra in extras), strict=True)
    return [label if player is None else (label, player) for label, player in pairs]


@dataclass(frozen=True)
class RowGroups:
    """Rows by group: `ids` [batch] counts groups from 0 in order of first appearance, `sizes` [groups] their rows.

    ["b", "a", "b"] gives ids [0, 1, 0] and sizes [2, 1]. Labels may be any hashable values.
    """

    ids: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, index: Sequence[object] | object, like: Tensor) -> RowGroups:
        """Group by the labels `index` (list, array or tensor of length batch), on the device of `like` [batch, ...]."""
        labels = labels_of(index)
        if len(labels) != like.shape[0]:
            raise ValueError(f"index names the group of {len(labels)} rows, but the batch has {like.shape[0]}.")
        numbers: dict[object, int] = {}
        ids = torch.tensor([numbers.setdefault(x, len(numbers)) for x in labels], dtype=torch.int64, device=like.device)
        return cls(ids, torch.bincount(ids, minlength=len(numbers)))

    @property
    def is_single(self) -> Tensor:
        """Whether a row is the only one of its group, [batch] bool."""
        return self.sizes[self.ids] == 1

    def sum(self, values: Tensor) -> Tensor:
        """Sums of `values` [batch, ...] over each group: [groups, ...]."""
        return values.new_zeros(len(self.sizes), *values.shape[1:]).index_add_(0, self.ids, values)

    def max(self, values: Tensor) -> Tensor:
        """Largest of `values` [batch] in each group: [groups]."""
        return values.new_full((len(self.sizes),), float("-inf")).scatter_reduce_(0, self.ids, values, "amax")

    def min(self, values: Tensor) -> Tensor:
        """Smallest of `values` [batch] in each group: [groups]."""
        return -self.max(-values)

    def minus_mean(self, values: Tensor) -> Tensor:
        """Values minus the mean of their group, [batch]; the row of a group of one keeps its value.

        Computed relative to the smallest member: a group of equal values gives exact zeros. Rounding noise would grow
        when divided by a standard deviation of almost 0.
        """
        above = values - self.min(values)[self.ids]
        centered = above - (self.sum(above) / self.sizes)[self.ids]
        return torch.where(self.is_single, values, centered)

    def std(self, values: Tensor) -> Tensor:
        """Unbiased standard deviation of each row's group, [batch]; 1 for a group of one."""
        squares = self.sum(self.minus_mean(values).square()) / (self.sizes - 1).clamp(min=1)
        return torch.where(self.is_single, 1.0, squares.sqrt()[self.ids])
