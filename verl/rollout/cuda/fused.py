"""Parts of a decode step that torch.compile fuses. On a GPU each is compiled to a kernel or two; elsewhere, and where no
compiler works, it runs as written. verl.models.cuda.pointwise has the parts with kernels of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from verl.models.cuda.dispatch import with_fallback
from verl.rollout.uniforms import uniforms_at


def merged_attention(
    own: torch.Tensor, own_lse: torch.Tensor, prefix: torch.Tensor, prefix_lse: torch.Tensor, place: torch.Tensor
) -> torch.Tensor:
    """Attention to two disjoint sets of keys, merged from the attention to each set: [rows, heads, head_dim].

    `own` [rows, heads, head_dim], `own_lse` [heads, rows]. The prefix part comes in places, of which row r has `place[r]`
    (int64 [rows]), with the query heads of a key head before the key heads: `prefix` [places, groups, kv_heads, head_dim],
    `prefix_lse` [kv_heads, places, groups].
    """
    theirs = prefix[place].transpose(1, 2).flatten(1, 2)
    their_lse = prefix_lse[:, place].transpose(0, 1).flatten(1, 2)
    share = torch.sigmoid(their_lse - own_lse.t()).unsqueeze(-1)
    return (own + (theirs - own) * share).to(own.dtype)


class Parts(NamedTuple):
    """The functions of this file, as written or compiled."""

    merged_attention: Callable[..., torch.Tensor]
    uniforms_at: Callable[..., torch.Tensor]


_FUNCTIONS: tuple[Callable[..., Any], ...] = (merged_attention, uniforms_at)


@functools.cache
def parts(compiled: bool) -> Parts:
    """All parts; the compiled ones are compiled when they are first called, once per process."""
    return Parts(*(with_fallback(torch.compile(f), f, f.__name__) if compiled else f for f in _FUNCTIONS))
