"""Low-rank adapters on their way to a copy of the policy: they travel alone, and the copy adds them to weights of its own.

    W = W_0 + (alpha / rank) B A       on each rank for its part of W, from its parts of A and B

W_0 does not train, so that the copy has had it since it was loaded; it is kept beside the weights that generate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from verl.models.lora import merged
from verl.models.rounding import Rounding
from verl.reshard.layout import Layout, Tensor
from verl.rollout.rollout_model import Replica


class Adapters:
    """Room for this rank's parts of `tensors`, adapters of the layers named in `scales` (alpha / rank), in `dtype`, and the
    weights that `replica` was loaded with. The sums are rounded as `rounding` says. The caller has seen that the replica has
    these layers."""

    def __init__(
        self,
        replica: Replica,
        tensors: Iterable[Tensor],
        layout: Layout,
        rank: int,
        scales: Mapping[str, float],
        dtype: torch.dtype,
        rounding: Rounding,
    ):
        self.scales, self.rounding = scales, rounding
        self.replica = replica
        held = replica.parts()
        self.base = {f"{layer}.weight": held[f"{layer}.weight"].clone() for layer in scales}
        device = next(iter(self.base.values())).device
        parts = {tensor.name: layout.part(tensor, rank) for tensor in tensors}
        self.parts = {
            name: torch.zeros(part.shape, dtype=dtype, device=device)
            for name, part in parts.items()
            if part is not None
        }

    @torch.no_grad()
    def merge(self) -> None:
        """Write what `parts` hold now into the weights that generate."""
        known = {**self.base, **self.parts}
        held = self.replica.parts()  # now: an engine may have moved its weights since the last update
        for name in self.base:
            self.rounding.write(
                held[name], name, merged(name, known.__getitem__, self.scales), self.replica.region(name)
            )
