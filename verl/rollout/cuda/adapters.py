"""LoRA adapters in a step whose addresses are fixed: one pair of matrices for all layers that a projection joins."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from verl.models.adapter_weights import LowRank, join_own
from verl.models.cpu.weights import Projection


class JoinedAdapters:
    """Copies of the adapters of `projection`; `refresh` copies them again after they have changed."""

    def __init__(self, projection: Projection, present: LowRank):
        self._projection, (self._down, self._up) = projection, present

    @classmethod
    def of(cls, projection: Projection) -> JoinedAdapters | None:
        """None for a projection whose layers have no adapters."""
        present = join_own(projection.parts, projection.weight.dtype)
        return None if present is None else cls(projection, present)

    def refresh(self) -> None:
        """Copy the present values."""
        present = join_own(self._projection.parts, self._down.dtype)
        assert present is not None
        self._down.copy_(present.down)
        self._up.copy_(present.up)

    def add_(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Adds the adapters' product with `x` [tokens, inputs] to `y` [tokens, outputs]."""
        return y.addmm_(F.linear(x, self._down), self._up.t())
