"""LoRA on Megatron's linear layers (verl/models/lora.py): a low-rank pair for each of the checkpoint's layers in one.

    column parallel   A x [tokens / t, rank] -> of all tokens -> B_r A x, the rows of rank r
    row parallel      A_r x_r [tokens, rank] -> summed over ranks, own tokens -> B A x

Only [tokens, rank] travels between tensor parallel ranks. A of the first and B of the second kind are whole on each rank. With
sequence parallelism each rank computes their gradients for its tokens, and Megatron sums them as it does for norms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from verl.engines.megatron.library import RowParallelLinear, TransformerConfig, mappings
from verl.models.lora import LoRALinear


class Pair(nn.Module):
    """This rank's part of the matrices of `layer`: `lora_A` [rank, in] and `lora_B` [out, rank]."""

    def __init__(self, layer: LoRALinear, config: TransformerConfig, *, divides_rows: bool):
        super().__init__()
        (rank, inputs), outputs, ranks = layer.lora_A.shape, layer.out_features, config.tensor_model_parallel_size
        inputs, outputs = (inputs, outputs // ranks) if divides_rows else (inputs // ranks, outputs)
        self.lora_A = nn.Parameter(torch.zeros(rank, inputs, dtype=config.params_dtype))
        self.lora_B = nn.Parameter(torch.zeros(outputs, rank, dtype=config.params_dtype))
        whole: Any = self.lora_A if divides_rows else self.lora_B
        whole.sequence_parallel = config.sequence_parallel


class LowRankPairs(nn.Module):
    """The pairs of one linear layer of Megatron, numbered as its blocks of rows; a forward hook of it. `layers` are the
    checkpoint's layers on the meta device, which say whether an adapter is active, and its scale."""

    def __init__(self, layers: Sequence[nn.Module], config: TransformerConfig, *, divides_rows: bool):
        super().__init__()
        self.layers, self.divides_rows, self.is_sequence_divided = tuple(layers), divides_rows, config.sequence_parallel
        self.num_ranks = config.tensor_model_parallel_size
        for number, layer in enumerate(layers):
            if isinstance(layer, LoRALinear):
                self.add_module(str(number), Pair(layer, config, divides_rows=divides_rows))

    def forward(self, linear: nn.Module, inputs: tuple[torch.Tensor, ...], output: Any) -> Any:
        """inputs ([tokens, 1, in],), output ([tokens, 1, out], bias) -> output with the pairs' products added."""
        out, bias = output
        pairs = [self._modules.get(str(n)) if getattr(x, "active", False) else None for n, x in enumerate(self.layers)]
        present: Any = [pair for pair in pairs if pair is not None]
        if not present:
            return output
        down = self._exchanged(F.linear(inputs[0], torch.cat([pair.lora_A for pair in present])))
        parts = iter(down.split([len(pair.lora_A) for pair in present], dim=-1))
        ups = [self._up(layer, pair, parts, out) for layer, pair in zip(self.layers, pairs, strict=True)]
        return out + torch.cat(ups, dim=-1), bias

    def _up(self, layer: Any, pair: Any, parts: Iterator[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        if pair is not None:
            return F.linear(next(parts), pair.lora_B) * layer.scale
        return out.new_zeros(*out.shape[:-1], layer.out_features // self.num_ranks)  # of queries, keys and values

    def _exchanged(self, down: torch.Tensor) -> torch.Tensor:
        if self.divides_rows and self.is_sequence_divided:
            return mappings.gather_from_sequence_parallel_region(down, tensor_parallel_output_grad=True)
        if self.divides_rows:
            return mappings.copy_to_tensor_model_parallel_region(down)
        if self.is_sequence_divided:
            return mappings.reduce_scatter_to_sequence_parallel_region(down)
        return mappings.reduce_from_tensor_model_parallel_region(down)


def adapt_linears(linears: Iterator[tuple[nn.Module, list[nn.Module]]], config: TransformerConfig) -> None:
    """Put adapters on linear layers of Megatron, given with the checkpoint's layers in each, in the order of rows."""
    for linear, layers in linears:
        if any(isinstance(layer, LoRALinear) for layer in layers):
            linear.adapters = LowRankPairs(layers, config, divides_rows=not isinstance(linear, RowParallelLinear))
            linear.register_forward_hook(linear.adapters)
