"""`verl.utils.attention_utils`: rows with padding to one row of tokens and back, with the returns of FlashAttention's
`bert_padding`."""

from __future__ import annotations

import torch
from functorch.einops import rearrange
from torch import Tensor

__all__ = ["index_first_axis", "pad_input", "rearrange", "unpad_input"]


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """`x[indices]`, with its gradient: [rows, ...] and [count] -> [count, ...]."""
    return x[indices]


def unpad_input(hidden_states: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens that the mask keeps, in one row: [batch, sequence, ...] and [batch, sequence] -> (tokens [count, ...],
    indices [count] into batch x sequence, int32 cumulative lengths [batch + 1], longest row, int32 lengths [batch])."""
    lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = attention_mask.flatten().nonzero().flatten()
    ends = lengths.new_zeros(len(lengths) + 1)
    ends[1:] = lengths.cumsum(0)
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, ends, int(lengths.max()), lengths


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Inverse of `unpad_input`: [count, ...] -> [batch, seqlen, ...], zeros elsewhere."""
    flat = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return flat.index_put((indices,), hidden_states).unflatten(0, (batch, seqlen))
