"""LoRA adapters in a step whose addresses are fixed: one pair of matrices for all layers that a projection joins.

y = x [W_q, W_k, W_v] + (x [A_q, A_v]) [B_q  0   0 ]      k without an adapter
                                       [ 0   0  B_v]
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from verl.models.cpu.weights import Projection
from verl.models.lora import LoRALinear


class JoinedAdapters:
    """Copies of the adapters of `projection`; `refresh` copies them again after they have changed."""

    def __init__(self, projection: Projection):
        weight, row, column = projection.weight, 0, 0
        self._parts: list[tuple[LoRALinear, slice, slice]] = []
        for part in projection.parts:
            if isinstance(part, LoRALinear):
                rank = len(part.lora_A)
                self._parts.append((part, slice(row, row + part.out_features), slice(column, column + rank)))
                column += rank
            row += part.out_features
        self._down = weight.new_zeros(column, weight.shape[1])
        self._up = weight.new_zeros(row, column)
        self.refresh()

    @classmethod
    def of(cls, projection: Projection) -> JoinedAdapters | None:
        """None for a projection whose layers have no adapters."""
        return cls(projection) if any(isinstance(part, LoRALinear) for part in projection.parts) else None

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the present values."""
        for part, rows, columns in self._parts:
            self._down[columns].copy_(part.lora_A)
            torch.mul(part.lora_B, part.scale, out=self._up[rows, columns])

    def add_(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Adds the adapters' product with `x` [tokens, inputs] to `y` [tokens, outputs]."""
        return y.addmm_(F.linear(x, self._down), self._up.t())
