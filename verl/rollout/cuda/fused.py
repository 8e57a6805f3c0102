"""Parts of a decoder layer between its matmuls. On a GPU each is compiled to a kernel or two; elsewhere, and
where no compiler works, it runs as written."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from verl.rollout.uniforms import uniforms_at

log = logging.getLogger(__name__)


class Rotation(NamedTuple):
    """Heads of the joined projection, and the norms of queries and keys: `q_norm` and `k_norm` [head_dim], or None for both."""

    num_heads: int
    num_kv_heads: int
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis in float32 or wider, rounded to x's dtype, times `weight`."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def add_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + delta, its RMS norm), all [tokens, hidden]."""
    total = x + delta
    return total, rms_norm(total, weight, eps)


def rotated(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotation: Rotation
) -> tuple[torch.Tensor, torch.Tensor]:
    """Joined projections [tokens, (heads + 2 kv_heads) * head_dim] -> q [tokens, heads, head_dim] and keys and values
    [2, tokens, kv_heads, head_dim]; q and k normalised if the family does, and rotated by cos, sin [tokens, head_dim]."""
    heads, kv_heads = rotation.num_heads, rotation.num_kv_heads
    q, k, v = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).split([heads, kv_heads, kv_heads], dim=1)
    if rotation.q_norm is not None and rotation.k_norm is not None:
        q, k = rms_norm(q, rotation.q_norm, rotation.eps), rms_norm(k, rotation.k_norm, rotation.eps)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + _half_turned(q) * sin, torch.stack([k * cos + _half_turned(k) * sin, v])


def _half_turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """[tokens, 2 * width] -> silu(first half) * second half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def merged_attention(
    own: torch.Tensor, own_lse: torch.Tensor, prefix: torch.Tensor, prefix_lse: torch.Tensor, place: torch.Tensor
) -> torch.Tensor:
    """Attention to two disjoint sets of keys, from that to each: [rows, heads, head_dim].

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

    rms_norm: Callable[..., torch.Tensor]
    add_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    rotated: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    swiglu: Callable[..., torch.Tensor]
    merged_attention: Callable[..., torch.Tensor]
    uniforms_at: Callable[..., torch.Tensor]


_FUNCTIONS: tuple[Callable[..., Any], ...] = (rms_norm, add_norm, rotated, swiglu, merged_attention, uniforms_at)


@functools.cache
def parts(compiled: bool) -> Parts:
    """All parts; the compiled ones are compiled when they are first called, once per process."""
    return Parts(*(_compiled(f) if compiled else f for f in _FUNCTIONS))


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    fast: Callable[..., Any] | None = torch.compile(function)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        nonlocal fast
        if fast is not None:
            try:
                return fast(*args)
            except Exception as error:  # a compiler fails in many ways, and none of them may cost the run
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                log.warning("%s is not compiled (%s: %s)", function.__name__, type(error).__name__, str(error)[:200])
                fast = None
        return function(*args)

    return call
