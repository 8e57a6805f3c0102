"""Attention of a decode step by Triton: a program has the queries that read one key head, and goes through the keys once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from verl.models.cuda.rotary import turned

_KEYS = 64  # of a pass through the loop
_MOST_QUERIES = 64  # of a program
_LEAST = 16  # rows, columns and terms of a product in the tensor cores


def launch_attend_own(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    store: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    most: int,
    pages: torch.Tensor | None,
    page_size: int,
    window: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See verl.models.cuda.decoding."""
    qkv, cos, sin = (x.contiguous() for x in (qkv, cos, sin))
    kv_heads, head_dim = store.shape[-2:]
    rows, num_heads = len(qkv), qkv.shape[-1] // head_dim - 2 * kv_heads
    q, out = (qkv.new_empty(rows, num_heads, head_dim) for _ in range(2))
    lse = qkv.new_empty(rows, num_heads, dtype=torch.float32)
    groups = num_heads // kv_heads
    if rows:
        _own_kernel[(rows, kv_heads)](
            qkv, cos, sin, q_norm, k_norm, q, out, lse, *_slots(store, starts, lengths, pages), kv_heads, eps, scale, window,
            HAS_NORMS=q_norm is not None, HAS_WINDOW=window > 0, GROUPS=groups,
            QUERIES=max(triton.next_power_of_2(groups), _LEAST), num_warps=4, **_shape(head_dim, page_size),
        )  # fmt: skip
    return q, out, lse


def launch_attend_prompts(
    q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    store: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    most: int,
    pages: torch.Tensor | None,
    page_size: int,
    gather: torch.Tensor,
    place: torch.Tensor,
    scale: float,
) -> None:
    """See verl.models.cuda.decoding."""
    assert q.is_contiguous()
    assert out.is_contiguous()
    lse = lse.contiguous()  # flash attention has heads first
    kv_heads, head_dim = store.shape[-2:]
    groups, width = q.shape[1] // kv_heads, len(gather) // len(starts)
    queries = min(max(triton.next_power_of_2(width * groups), _LEAST), _MOST_QUERIES)
    _prompts_kernel[(len(starts), kv_heads, triton.cdiv(width * groups, queries))](
        q, out, lse, *_slots(store, starts, lengths, pages), gather, place, kv_heads, width, scale,
        GROUPS=groups, QUERIES=queries, num_warps=queries // 8, **_shape(head_dim, page_size),
    )  # fmt: skip


def _slots(
    store: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, pages: torch.Tensor | None
) -> tuple[torch.Tensor | int | None, ...]:
    assert store[0].is_contiguous()
    assert pages is None or pages.is_contiguous()
    return store, store.stride(0), starts, lengths, pages, 0 if pages is None else pages.stride(0)


def _shape(head_dim: int, page_size: int) -> dict[str, int]:
    block = max(triton.next_power_of_2(head_dim // 2), _LEAST)
    return {"HALF": head_dim // 2, "HALF_BLOCK": block, "PAGE": page_size, "KEYS": _KEYS}


@triton.jit
def _own_kernel(
    qkv, cos, sin, q_norm, k_norm, q, out, lse, store, store_stride, starts, lengths, pages, pages_stride, kv_heads, eps,
    scale, window, HAS_NORMS: tl.constexpr, HAS_WINDOW: tl.constexpr, GROUPS: tl.constexpr, QUERIES: tl.constexpr,
    HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at, group = tl.arange(0, HALF_BLOCK)[None, :], tl.arange(0, QUERIES)[:, None]
    num_heads = kv_heads * GROUPS
    head, mask = kv_head * GROUPS + group, (group < GROUPS) & (at < HALF)
    source = qkv + token * (num_heads + 2 * kv_heads) * 2 * HALF
    turns = token * 2 * HALF
    q_a, q_b = _halves(source + head * 2 * HALF + at, mask, HALF)
    q_a, q_b = turned(q_a, q_b, q_norm, cos + turns, sin + turns, at, eps, HAS_NORMS, HALF)
    q_a, q_b = q_a.to(q.dtype.element_ty), q_b.to(q.dtype.element_ty)
    to = (token * num_heads + head) * 2 * HALF + at
    tl.store(q + to, q_a, mask=mask)
    tl.store(q + to + HALF, q_b, mask=mask)

    k_a, k_b = _halves(source + (num_heads + kv_head) * 2 * HALF + at, at < HALF, HALF)
    k_a, k_b = turned(k_a, k_b, k_norm, cos + turns, sin + turns, at, eps, HAS_NORMS, HALF)
    k_a, k_b = k_a.to(q.dtype.element_ty), k_b.to(q.dtype.element_ty)
    v_a, v_b = _halves(source + (num_heads + kv_heads + kv_head) * 2 * HALF + at, at < HALF, HALF)
    slot, length = tl.load(starts + token), tl.load(lengths + token).to(tl.int32)
    place = _place(slot, length, pages, pages_stride, length >= 0, PAGE)
    new = store + (place * kv_heads + kv_head) * 2 * HALF + at
    tl.store(new, k_a, mask=at < HALF)
    tl.store(new + HALF, k_b, mask=at < HALF)
    tl.store(new + store_stride, v_a.to(q.dtype.element_ty), mask=at < HALF)
    tl.store(new + store_stride + HALF, v_b.to(q.dtype.element_ty), mask=at < HALF)

    # the softmax begins with the new token, so that no thread reads what another has just written
    peak = (_dots(q_a, k_a) + _dots(q_b, k_b)) * scale
    total = tl.zeros_like(peak) + 1.0
    sum_a, sum_b = tl.zeros([QUERIES, HALF_BLOCK], tl.float32) + v_a, tl.zeros([QUERIES, HALF_BLOCK], tl.float32) + v_b
    first = tl.maximum(length + 1 - window, 0) if HAS_WINDOW else length * 0
    for start in range(first, length, KEYS):
        peak, total, sum_a, sum_b = _extended(
            peak, total, sum_a, sum_b, q_a, q_b, start, length, slot, store, store_stride, pages, pages_stride, kv_heads,
            kv_head, scale, HALF, HALF_BLOCK, PAGE, KEYS,
        )  # fmt: skip
    tl.store(out + to, (sum_a / total[:, None]).to(out.dtype.element_ty), mask=mask)
    tl.store(out + to + HALF, (sum_b / total[:, None]).to(out.dtype.element_ty), mask=mask)
    group = tl.arange(0, QUERIES)
    tl.store(lse + token * num_heads + kv_head * GROUPS + group, peak + tl.log(total), mask=group < GROUPS)


@triton.jit
def _prompts_kernel(
    q, out, lse, store, store_stride, starts, lengths, pages, pages_stride, gather, places, kv_heads, width, scale,
    GROUPS: tl.constexpr, QUERIES: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, PAGE: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    prompt, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query = tl.program_id(2) * QUERIES + tl.arange(0, QUERIES)
    place, group = prompt * width + query // GROUPS, query % GROUPS
    exists = query < width * GROUPS
    token = tl.load(gather + place, mask=exists, other=0)
    exists &= tl.load(places + token, mask=exists, other=-1) == place  # an empty place repeats a row
    head = token * kv_heads * GROUPS + kv_head * GROUPS + group
    at = tl.arange(0, HALF_BLOCK)[None, :]
    to, mask = head[:, None] * 2 * HALF + at, exists[:, None] & (at < HALF)
    q_a = tl.load(q + to, mask=mask, other=0.0)
    q_b = tl.load(q + to + HALF, mask=mask, other=0.0)
    slot, length = tl.load(starts + prompt), tl.load(lengths + prompt).to(tl.int32)
    peak, total = tl.zeros([QUERIES], tl.float32) - float("inf"), tl.zeros([QUERIES], tl.float32)
    sum_a, sum_b = tl.zeros([QUERIES, HALF_BLOCK], tl.float32), tl.zeros([QUERIES, HALF_BLOCK], tl.float32)
    for start in range(0, length, KEYS):
        peak, total, sum_a, sum_b = _extended(
            peak, total, sum_a, sum_b, q_a, q_b, start, length, slot, store, store_stride, pages, pages_stride, kv_heads,
            kv_head, scale, HALF, HALF_BLOCK, PAGE, KEYS,
        )  # fmt: skip
    own_lse = tl.load(lse + head, mask=exists, other=0.0)
    top = tl.maximum(own_lse, peak)
    own, theirs = tl.exp(own_lse - top), tl.exp(peak - top)
    whole = own + theirs * total
    own, theirs = (own / whole)[:, None], (theirs / whole)[:, None]
    out_a = tl.load(out + to, mask=mask, other=0.0).to(tl.float32) * own + sum_a * theirs
    out_b = tl.load(out + to + HALF, mask=mask, other=0.0).to(tl.float32) * own + sum_b * theirs
    tl.store(out + to, out_a.to(out.dtype.element_ty), mask=mask)
    tl.store(out + to + HALF, out_b.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _extended(
    peak, total, sum_a, sum_b, q_a, q_b, start, length, slot, store, store_stride, pages, pages_stride, kv_heads, kv_head,
    scale, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The softmax of queries q = (q_a, q_b), with the keys from `start` on: greatest score, sum and weighted values."""
    key, at = start + tl.arange(0, KEYS), tl.arange(0, HALF_BLOCK)[None, :]
    place = _place(slot, key, pages, pages_stride, key < length, PAGE)
    source = store + (place * kv_heads + kv_head)[:, None] * 2 * HALF + at
    mask = (key < length)[:, None] & (at < HALF)
    k_a = tl.load(source, mask=mask, other=0.0)
    k_b = tl.load(source + HALF, mask=mask, other=0.0)
    scores = tl.dot(q_a, tl.trans(k_a), input_precision="ieee") + tl.dot(q_b, tl.trans(k_b), input_precision="ieee")
    scores = tl.where((key < length)[None, :], scores * scale, float("-inf"))
    top = tl.maximum(peak, tl.max(scores, axis=1))
    share, weights = tl.exp(peak - top), tl.exp(scores - top[:, None])
    v_a = tl.load(source + store_stride, mask=mask, other=0.0)
    v_b = tl.load(source + store_stride + HALF, mask=mask, other=0.0)
    rounded = weights.to(v_a.dtype)
    sum_a = sum_a * share[:, None] + tl.dot(rounded, v_a, input_precision="ieee")
    sum_b = sum_b * share[:, None] + tl.dot(rounded, v_b, input_precision="ieee")
    return top, total * share + tl.sum(weights, axis=1), sum_a, sum_b


@triton.jit
def _place(slot, key, pages, pages_stride, mask, PAGE: tl.constexpr):
    if PAGE:
        page = tl.load(pages + slot * pages_stride + key // PAGE, mask=mask, other=0).to(tl.int64)
        return page * PAGE + key % PAGE
    return slot + key


@triton.jit
def _halves(source, mask, HALF: tl.constexpr):
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    return first, tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _dots(a, b):
    return tl.sum(a.to(tl.float32) * b.to(tl.float32), axis=1)
