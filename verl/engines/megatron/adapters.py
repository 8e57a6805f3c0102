"""LoRA and DoRA on Megatron's linear layers (verl/models/lora.py): a low-rank pair for each of the checkpoint's layers in one.

    column parallel   A x [tokens / t, rank] -> of all tokens -> B_r A x, the rows of rank r
    row parallel      A_r x_r [tokens, rank] -> summed over ranks, own tokens -> B A x

Only [tokens, rank] travels between tensor parallel ranks. A of the first kind and B of the second are complete on each rank,
and both of a layer that is not divided. With sequence parallelism each rank computes their gradients for its tokens, and
Megatron sums them as it does for norms. DoRA's lengths of rows lie as the rows of B; the norms of a row parallel layer are
summed over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from verl.engines.megatron.library import ColumnParallelLinear, RowParallelLinear, TransformerConfig, mappings
from verl.models.lora import DoRALinear, LoRALinear


class Pair(nn.Module):
    """This rank's part of the matrices of `layer`: `lora_A` [rank, in] and `lora_B` [out, rank], with DoRA the lengths of rows
    [out]. `divided` is the dimension of its weight that tensor parallel ranks share; None: each has all of it."""

    def __init__(self, layer: LoRALinear, config: TransformerConfig, divided: int | None):
        super().__init__()
        sizes = [layer.out_features, layer.in_features]
        if divided is not None:
            sizes[divided] //= config.tensor_model_parallel_size
        rank, dtype = len(layer.lora_A), config.params_dtype
        self.lora_A = nn.Parameter(torch.zeros(rank, sizes[1], dtype=dtype))
        self.lora_B = nn.Parameter(torch.zeros(sizes[0], rank, dtype=dtype))
        if isinstance(layer, DoRALinear):
            wide = torch.promote_types(dtype, torch.float32)
            self.lora_magnitude_vector = nn.Parameter(torch.zeros(sizes[0], dtype=wide))
        for name, parameter in self.named_parameters():
            if divided != (1 if name == "lora_A" else 0):
                parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class LowRankPairs(nn.Module):
    """The pairs of one linear layer of Megatron, numbered as its blocks of rows; a forward hook of it. `layers` are the
    checkpoint's layers on the meta device: they say whether an adapter is active, and its scale."""

    def __init__(self, layers: Sequence[Any], config: TransformerConfig, divided: int | None):
        super().__init__()
        self.layers, self.divided, self.config = tuple(layers), divided, config
        ranks = config.tensor_model_parallel_size if divided == 0 else 1
        self.sizes = [layer.out_features // ranks for layer in layers]
        for number, layer in enumerate(layers):
            if isinstance(layer, LoRALinear):
                self.add_module(str(number), Pair(layer, config, divided))

    def forward(self, linear: Any, inputs: tuple[torch.Tensor, ...], output: object) -> object:
        """inputs ([tokens, 1, in],), output [tokens, 1, out], with a bias if Megatron returns one -> output with the pairs'
        products added, its rows as long as DoRA has them."""
        out, *bias = output if isinstance(output, tuple) else (output,)
        pairs: list[Any] = [
            self._modules.get(str(n)) if getattr(x, "active", False) else None for n, x in enumerate(self.layers)
        ]
        present = [pair for pair in pairs if pair is not None]
        if not present:
            return output
        down = self._exchanged(F.linear(inputs[0], torch.cat([pair.lora_A for pair in present])))
        parts = iter(down.split([len(pair.lora_A) for pair in present], dim=-1))
        ups = [
            out.new_zeros(*out.shape[:-1], size) if pair is None else F.linear(next(parts), pair.lora_B) * layer.scale
            for layer, pair, size in zip(self.layers, pairs, self.sizes, strict=True)
        ]
        out = out + torch.cat(ups, dim=-1)
        if any(isinstance(layer, DoRALinear) for layer in self.layers):
            bias_inside = 0 if linear.bias is None else linear.bias  # Megatron adds it to queries, keys and values
            out = ((out - bias_inside) * self._stretches(linear.weight, pairs)).to(out.dtype) + bias_inside
        return (out, *bias) if bias else out

    def _stretches(self, weight: torch.Tensor, pairs: list[Any]) -> torch.Tensor:
        """m / |W + s B A| of each row [out], 1 without a pair; the norm is a constant for gradients."""
        stretches = []
        for layer, pair, rows in zip(self.layers, pairs, weight.split(self.sizes), strict=True):
            if pair is None:
                stretches.append(rows.new_ones(len(rows)))
                continue
            lengths = pair.lora_magnitude_vector
            base, up, down = (part.detach().to(lengths.dtype) for part in (rows, pair.lora_B, pair.lora_A))
            squares = torch.addmm(base, up, down, alpha=layer.scale).square().sum(1)
            if self.divided == 1:
                squares = mappings.reduce_from_tensor_model_parallel_region(squares)
            stretches.append(lengths / squares.sqrt())
        return torch.cat(stretches)

    def _exchanged(self, down: torch.Tensor) -> torch.Tensor:
        if self.divided is None:
            return down
        exchanged: torch.Tensor
        if self.divided == 0 and self.config.sequence_parallel:
            exchanged = mappings.gather_from_sequence_parallel_region(down, tensor_parallel_output_grad=True)
        elif self.divided == 0:
            exchanged = mappings.copy_to_tensor_model_parallel_region(down)
        elif self.config.sequence_parallel:
            exchanged = mappings.reduce_scatter_to_sequence_parallel_region(down)
        else:
            exchanged = mappings.reduce_from_tensor_model_parallel_region(down)
        return exchanged


def adapt_linears(linears: Iterator[tuple[nn.Module, list[nn.Module]]], config: TransformerConfig) -> None:
    """Put adapters on linear layers of Megatron, given with the checkpoint's layers in each, in the order of rows."""
    dims = {ColumnParallelLinear: 0, RowParallelLinear: 1}
    for linear, layers in linears:
        if any(isinstance(layer, LoRALinear) for layer in layers):
            linear.adapters = LowRankPairs(layers, config, dims.get(type(linear)))
            linear.register_forward_hook(linear.adapters)
