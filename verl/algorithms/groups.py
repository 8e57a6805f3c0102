"""Groups of rows that share a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """Rows by group: `ids` [batch] counts groups from 0 in order of first appearance, `sizes` [groups] counts their
    rows.

    ["b", "a", "b"] gives ids [0, 1, 0] and sizes [2, 1]. Labels may be anything hashable and are never used as numbers.
    """

    ids: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, index: Sequence[Any] | Any, like: Tensor) -> Groups:
        """Groups of the labels `index` (list, array or tensor of length batch), on the device of `like` [batch,
        ...]."""
        labels = index.tolist() if hasattr(index, "tolist") else list(index)
        if len(labels) != like.shape[0]:
            raise ValueError(f"index names the group of {len(labels)} rows, but the batch has {like.shape[0]}.")
        seen: dict[Any, int] = {}
        ids = torch.tensor([seen.setdefault(x, len(seen)) for x in labels], dtype=torch.int64, device=like.device)
        return cls(ids, torch.bincount(ids, minlength=len(seen)))

    @property
    def alone(self) -> Tensor:
        """[batch] bool: the row is its group's only one."""
        return self.sizes[self.ids] == 1

    def sum(self, values: Tensor) -> Tensor:
        """[groups, ...]: sums of `values` [batch, ...] over each group."""
        return values.new_zeros(len(self.sizes), *values.shape[1:]).index_add_(0, self.ids, values)

    def max(self, values: Tensor) -> Tensor:
        """[groups]: largest of `values` [batch] in each group."""
        return values.new_full((len(self.sizes),), float("-inf")).scatter_reduce_(0, self.ids, values, "amax")

    def min(self, values: Tensor) -> Tensor:
        """[groups]: smallest of `values` [batch] in each group."""
        return -self.max(-values)

    def less_mean(self, values: Tensor) -> Tensor:
        """[batch]: values less their group's mean; a row alone in its group keeps its value (mean 0).

        Taken relative to the smallest member, so that a group of equal values gives exact zeros and not rounding noise,
        which a division by a standard deviation of almost 0 would blow up.
        """
        above = values - self.min(values)[self.ids]
        centered = above - (self.sum(above) / self.sizes)[self.ids]
        return torch.where(self.alone, values, centered)

    def std(self, values: Tensor) -> Tensor:
        """[batch]: unbiased standard deviation of the row's group; 1 for a row alone in its group."""
        squares = self.sum(self.less_mean(values).square()) / (self.sizes - 1).clamp(min=1)
        return torch.where(self.alone, 1.0, squares.sqrt()[self.ids])
