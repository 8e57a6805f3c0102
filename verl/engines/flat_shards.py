"""Parameters that are divided over ranks as slices of the flattened tensor, wherever the cuts fall."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from verl.models.parallel.collectives import gather_rows
from verl.models.rounding import Region


class FlatSlice(NamedTuple):
    """`size` elements from `start` on of a flattened tensor; they lie at `offset` of the flat buffer number `buffer`."""

    start: int
    size: int
    buffer: int = 0
    offset: int = 0


class FlatShards:
    """The slices of this rank, `own`, and of all others. Slices of a tensor lie in rank order and cover it."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], own: Mapping[str, FlatSlice], device: torch.device):
        """Collective, on `device`. All ranks name the same tensors in `own`."""
        self.shapes, self.own = dict(shapes), dict(own)
        world: Any = dist.group.WORLD
        self.group = world
        mine = torch.tensor([part.size for part in own.values()], device=device)
        sizes = [torch.empty_like(mine) for _ in range(self.group.size())]
        dist.all_gather(sizes, mine, group=self.group)
        self.sizes = dict(zip(own, torch.stack(sizes, 1).tolist(), strict=True))
        assert all(sum(rank_sizes) == math.prod(self.shapes[name]) for name, rank_sizes in self.sizes.items())

    def region(self, name: str) -> Region:
        """The place of this rank's slice in the flattened tensor."""
        return Region((math.prod(self.shapes[name]),), (self.own[name].start,))

    def whole(self, name: str, value: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """The tensor of which `value` [size] is this rank's slice. Collective; every rank gets it."""
        return gather_rows(value.to(device, dtype), self.sizes[name], self.group).view(self.shapes[name])

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's slice of `whole`."""
        own = self.own[name]
        return whole.reshape(-1)[own.start : own.start + own.size]
