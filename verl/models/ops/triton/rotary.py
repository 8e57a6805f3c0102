"""Norms of queries and keys, rotary embedding, and keys and values written to their store, by one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_MOST_HEADS = 8  # of a program


def launch_write_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    store: torch.Tensor,
    places: torch.Tensor,
) -> torch.Tensor:
    """See verl.models.ops.pointwise; a program has one token and some of its heads."""
    qkv, cos, sin, places = (x.contiguous() for x in (qkv, cos, sin, places))
    kv_heads, head_dim = store.shape[-2:]
    num_heads = qkv.shape[-1] // head_dim - 2 * kv_heads
    q = qkv.new_empty(len(qkv), num_heads, head_dim)
    block = min(triton.next_power_of_2(num_heads + 2 * kv_heads), _MOST_HEADS)
    if len(qkv):
        assert store[0].is_contiguous()
        _kernel[(len(qkv), triton.cdiv(num_heads + 2 * kv_heads, block))](
            qkv, cos, sin, q_norm, k_norm, q, store, places, store.stride(0), num_heads, kv_heads, eps,
            HAS_NORMS=q_norm is not None, HALF=head_dim // 2, HALF_BLOCK=triton.next_power_of_2(head_dim // 2),
            HEADS_BLOCK=block, num_warps=2,
        )  # fmt: skip
    return q


@triton.jit
def _kernel(
    qkv, cos, sin, q_norm, k_norm, q, store, places, store_stride, num_heads, kv_heads, eps,
    HAS_NORMS: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, HEADS_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)[:, None]
    at = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (head < num_heads + 2 * kv_heads) & (at < HALF)
    is_query, is_value = head < num_heads, head >= num_heads + kv_heads
    source = qkv + (token * (num_heads + 2 * kv_heads) + head) * 2 * HALF + at
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    turns = token * 2 * HALF
    cos, sin = cos + turns, sin + turns
    turned_a, turned_b = turned(first, second, q_norm, cos, sin, at, eps, HAS_NORMS, HALF)
    if HAS_NORMS:
        key_a, key_b = turned(first, second, k_norm, cos, sin, at, eps, HAS_NORMS, HALF)
        turned_a, turned_b = tl.where(is_query, turned_a, key_a), tl.where(is_query, turned_b, key_b)
    out_a = tl.where(is_value, first, turned_a).to(q.dtype.element_ty)
    out_b = tl.where(is_value, second, turned_b).to(q.dtype.element_ty)
    to_q = q + (token * num_heads + head) * 2 * HALF + at
    tl.store(to_q, out_a, mask=inside & is_query)
    tl.store(to_q + HALF, out_b, mask=inside & is_query)
    kv_head = tl.where(is_value, head - num_heads - kv_heads, head - num_heads)
    slot = tl.load(places + token) * kv_heads + kv_head
    to_store = store + tl.where(is_value, store_stride, 0) + slot * 2 * HALF + at
    tl.store(to_store, out_a, mask=inside & (head >= num_heads))
    tl.store(to_store + HALF, out_b, mask=inside & (head >= num_heads))


@triton.jit
def turned(a, b, norm, cos, sin, at, eps, HAS_NORM: tl.constexpr, HALF: tl.constexpr):
    """Both halves of heads [heads, half], normalised by the weights `norm` and rotated by cos and sin of their token."""
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * HALF) + eps)[:, None]
        a, b = a * scale * row(norm, at, HALF), b * scale * row(norm + HALF, at, HALF)
    turned_a = a * row(cos, at, HALF) - b * row(sin, at, HALF)
    return turned_a, b * row(cos + HALF, at, HALF) + a * row(sin + HALF, at, HALF)


@triton.jit
def row(pointer, at, HALF: tl.constexpr):
    """Half a head of numbers, as float32."""
    return tl.load(pointer + at, mask=at < HALF, other=0.0).to(tl.float32)
