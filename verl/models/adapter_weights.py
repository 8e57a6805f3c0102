"""LoRA adapters outside of any module, and the adapters of joined projections as one pair of matrices.

y = x [W_q, W_k, W_v] + (x [A_q, A_v]) [B_q  0   0 ]      k without an adapter
                                       [ 0   0  B_v]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from verl.models.lora import LoRALinear, LoRASpec, lora_layers

ALPHA = 32  # of adapters that are made here, for any rank


class LowRank(NamedTuple):
    """y += up (down x): `down` [ranks, inputs], and `up` [outputs, ranks], with the scale in it."""

    down: torch.Tensor
    up: torch.Tensor


@dataclass(frozen=True, eq=False)
class AdapterWeights:
    """The weights of an adapter: `lora_A` [rank, in] and `lora_B` [out, rank] of each of its layers, by parameter name.
    y = W x + (alpha / rank) B A x."""

    rank: int
    tensors: Mapping[str, torch.Tensor]
    alpha: float = ALPHA

    @classmethod
    def of(cls, module: nn.Module) -> AdapterWeights | None:
        """The adapters that `module` computes with, not copied; None without any."""
        layers = {name: layer for name, layer in lora_layers(module).items() if layer.active}
        if not layers:
            return None
        first = next(iter(layers.values()))
        named = [
            (f"{name}.{part}", getattr(layer, part)) for name, layer in layers.items() for part in ("lora_A", "lora_B")
        ]
        return cls(len(first.lora_A), {name: value.detach() for name, value in named}, first.scale * len(first.lora_A))

    @property
    def layers(self) -> list[str]:
        """The names of the adapted layers."""
        return [name.removesuffix(".lora_A") for name in self.tensors if name.endswith(".lora_A")]

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / self.rank

    @property
    def spec(self) -> LoRASpec:
        """Rank and alpha, as the adapter's files have them."""
        return LoRASpec(self.rank, self.alpha, tuple(self.layers))

    def to(self, device: torch.device) -> AdapterWeights:
        """The weights on a device; this object if they are there."""
        if all(tensor.device == device for tensor in self.tensors.values()):
            return self
        return replace(self, tensors={name: tensor.to(device) for name, tensor in self.tensors.items()})

    def num_bytes(self) -> int:
        """Memory of the weights."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def joined(self, names: Sequence[str], outputs: Sequence[int], dtype: torch.dtype) -> LowRank | None:
        """The adapters of the layers `names` with one input, as one; None if none is adapted."""
        tensors = self.tensors
        pairs = [(tensors[f"{n}.lora_A"], tensors[f"{n}.lora_B"]) if f"{n}.lora_A" in tensors else None for n in names]
        return join(pairs, outputs, [self.scale] * len(names), dtype)


@torch.no_grad()
def join(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor] | None],
    outputs: Sequence[int],
    scales: Sequence[float],
    dtype: torch.dtype,
) -> LowRank | None:
    """The adapters (A [rank, in], B [out, rank]) of layers of so many `outputs`, back to back, as one. None without any."""
    present = [pair for pair in pairs if pair is not None]
    if not present:
        return None
    down = torch.cat([a for a, _ in present]).to(dtype)
    up, row, column = down.new_zeros(sum(outputs), len(down)), 0, 0
    for pair, count, scale in zip(pairs, outputs, scales, strict=True):
        if pair is not None:
            rank = len(pair[0])
            up[row : row + count, column : column + rank] = pair[1] * scale
            column += rank
        row += count
    return LowRank(down, up)


def join_own(parts: Sequence[nn.Linear], dtype: torch.dtype) -> LowRank | None:
    """The present adapters of `parts` with one input, as one; None if none is adapted."""
    pairs = [(part.lora_A, part.lora_B) if isinstance(part, LoRALinear) else None for part in parts]
    scales = [part.scale if isinstance(part, LoRALinear) else 0.0 for part in parts]
    return join(pairs, [part.out_features for part in parts], scales, dtype)
