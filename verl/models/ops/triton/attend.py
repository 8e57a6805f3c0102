"""Attention of a decode step by Triton: a program has the queries that read one key head, and goes through the keys once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from verl.models.ops.triton.overlap import overlap, start_next, wait
from verl.models.ops.triton.rotary import turned

_KEYS = 64  # of a pass through the loop
_SPAN = 128  # keys of a prompt for one program; more in prompts of more than _MOST_SPANS * _SPAN tokens
_MOST_SPANS = 16
_MOST_QUERIES = 64  # of a program
_MOST_WARPS, _OWN_WARPS = 8, 4  # of a program for prompts at most, of a program for own tokens; timed on an H100
_LEAST = 16  # rows, columns and terms of a product in the tensor cores


def launch_attend(
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
    prompt_store: torch.Tensor | None = None,
    prompt_starts: torch.Tensor | None = None,
    prompt_lengths: torch.Tensor | None = None,
    most_of_prompts: int = 0,
    prompt_pages: torch.Tensor | None = None,
    prompt_page_size: int = 0,
    gather: torch.Tensor | None = None,
    place: torch.Tensor | None = None,
) -> torch.Tensor:
    """See verl.models.ops.decoding. The first kernel attends to spans of the prompts, many at a time; the second to the rows'
    own tokens, at the same time where kernels overlap, and adds the spans in their order."""
    qkv, cos, sin = (x.contiguous() for x in (qkv, cos, sin))
    kv_heads, head_dim = store.shape[-2:]
    rows, num_heads = len(qkv), qkv.shape[-1] // head_dim - 2 * kv_heads
    groups = num_heads // kv_heads
    out, parts, part_lse, spans = qkv.new_empty(rows, num_heads, head_dim), None, None, 0
    if not rows:
        return out
    if prompt_store is not None:
        assert prompt_starts is not None
        assert prompt_lengths is not None
        assert gather is not None
        spans = min(triton.cdiv(most_of_prompts, _SPAN), _MOST_SPANS)
        parts = qkv.new_empty(spans, rows, num_heads, head_dim, dtype=torch.float32)
        part_lse = qkv.new_empty(spans, rows, num_heads, dtype=torch.float32)
        width = len(gather) // len(prompt_starts)
        queries = min(max(triton.next_power_of_2(width * groups), _LEAST), _MOST_QUERIES)
        blocks, warps = triton.cdiv(width * groups, queries), min(queries // 8, _MOST_WARPS)
        _prompts_kernel[(len(prompt_starts), kv_heads * blocks, spans)](
            qkv, cos, sin, q_norm, parts, part_lse, *_slots(prompt_store, prompt_starts, prompt_lengths, prompt_pages),
            gather, place, rows, kv_heads, width, eps, scale, HAS_NORMS=q_norm is not None, GROUPS=groups, QUERIES=queries,
            SPAN=_SPAN, MOST_SPANS=_MOST_SPANS, num_warps=warps, **_shape(qkv, head_dim, prompt_page_size),
        )  # fmt: skip
    _own_kernel[(rows, kv_heads)](
        qkv, cos, sin, q_norm, k_norm, out, *_slots(store, starts, lengths, pages), parts, part_lse, gather, place, rows,
        kv_heads, eps, scale, window, HAS_NORMS=q_norm is not None, HAS_WINDOW=window > 0, SPANS=spans, GROUPS=groups,
        QUERIES=max(triton.next_power_of_2(groups), _LEAST), num_warps=_OWN_WARPS, **_shape(qkv, head_dim, page_size),
    )  # fmt: skip
    return out


def _slots(
    store: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, pages: torch.Tensor | None
) -> tuple[torch.Tensor | int | None, ...]:
    assert store[0].is_contiguous()
    assert pages is None or pages.is_contiguous()
    return store, store.stride(0), starts, lengths, pages, 0 if pages is None else pages.stride(0)


def _shape(qkv: torch.Tensor, head_dim: int, page_size: int) -> dict[str, object]:
    block = max(triton.next_power_of_2(head_dim // 2), _LEAST)
    return {"HALF": head_dim // 2, "HALF_BLOCK": block, "PAGE": page_size, "KEYS": _KEYS, **overlap(qkv)}


@triton.jit
def _own_kernel(
    qkv, cos, sin, q_norm, k_norm, out, store, store_stride, starts, lengths, pages, pages_stride, parts, part_lse, gather,
    places, rows, kv_heads, eps, scale, window, HAS_NORMS: tl.constexpr, HAS_WINDOW: tl.constexpr, SPANS: tl.constexpr,
    GROUPS: tl.constexpr, QUERIES: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, PAGE: tl.constexpr,
    KEYS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    if not SPANS:
        wait(OVERLAPS)
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at, group = tl.arange(0, HALF_BLOCK)[None, :], tl.arange(0, QUERIES)
    num_heads = kv_heads * GROUPS
    head = kv_head * GROUPS + group
    mask = (group < GROUPS)[:, None] & (at < HALF)
    source = qkv + token * (num_heads + 2 * kv_heads) * 2 * HALF
    turns = token * 2 * HALF
    q_a, q_b = _halves(source + head[:, None] * 2 * HALF + at, mask, HALF)
    q_a, q_b = turned(q_a, q_b, q_norm, cos + turns, sin + turns, at, eps, HAS_NORMS, HALF)
    q_a, q_b = q_a.to(out.dtype.element_ty), q_b.to(out.dtype.element_ty)

    k_a, k_b = _halves(source + (num_heads + kv_head) * 2 * HALF + at, at < HALF, HALF)
    k_a, k_b = turned(k_a, k_b, k_norm, cos + turns, sin + turns, at, eps, HAS_NORMS, HALF)
    k_a, k_b = k_a.to(out.dtype.element_ty), k_b.to(out.dtype.element_ty)
    v_a, v_b = _halves(source + (num_heads + kv_heads + kv_head) * 2 * HALF + at, at < HALF, HALF)
    slot, length = tl.load(starts + token), tl.load(lengths + token).to(tl.int32)
    new = store + (_place(slot, length, pages, pages_stride, length >= 0, PAGE) * kv_heads + kv_head) * 2 * HALF + at
    tl.store(new, k_a, mask=at < HALF)
    tl.store(new + HALF, k_b, mask=at < HALF)
    tl.store(new + store_stride, v_a.to(out.dtype.element_ty), mask=at < HALF)
    tl.store(new + store_stride + HALF, v_b.to(out.dtype.element_ty), mask=at < HALF)

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
    if SPANS:
        has_prompt = tl.load(gather + tl.load(places + token)) == token
        wait(OVERLAPS)
        for span in tl.static_range(SPANS):
            part = (span * rows + token) * num_heads + head
            lse = tl.load(part_lse + part, mask=group < GROUPS, other=float("-inf"))
            lse = tl.where(has_prompt, lse, float("-inf"))
            exists = (lse > float("-inf"))[:, None]  # a shorter prompt has fewer spans; the others are not written
            to = part[:, None] * 2 * HALF + at
            part_a = tl.where(exists, tl.load(parts + to, mask=mask, other=0.0), 0.0)
            part_b = tl.where(exists, tl.load(parts + to + HALF, mask=mask, other=0.0), 0.0)
            top = tl.maximum(peak, lse)
            share, weight = tl.exp(peak - top), tl.exp(lse - top)
            sum_a = sum_a * share[:, None] + part_a * weight[:, None]
            sum_b = sum_b * share[:, None] + part_b * weight[:, None]
            peak, total = top, total * share + weight
    to = out + (token * num_heads + head)[:, None] * 2 * HALF + at
    tl.store(to, (sum_a / total[:, None]).to(out.dtype.element_ty), mask=mask)
    tl.store(to + HALF, (sum_b / total[:, None]).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _prompts_kernel(
    qkv, cos, sin, q_norm, parts, part_lse, store, store_stride, starts, lengths, pages, pages_stride, gather, places, rows,
    kv_heads, width, eps, scale, HAS_NORMS: tl.constexpr, GROUPS: tl.constexpr, QUERIES: tl.constexpr, SPAN: tl.constexpr,
    MOST_SPANS: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A span has SPAN keys, or in longer prompts a MOST_SPANS-th of them, whatever the other prompts are."""
    wait(OVERLAPS)
    start_next(OVERLAPS)
    prompt, kv_head, span = tl.program_id(0).to(tl.int64), tl.program_id(1) % kv_heads, tl.program_id(2)
    query = tl.program_id(1) // kv_heads * QUERIES + tl.arange(0, QUERIES)
    place, head = prompt * width + query // GROUPS, kv_head * GROUPS + query % GROUPS
    inside = query < width * GROUPS
    token = tl.load(gather + place, mask=inside, other=0)
    exists = inside & (tl.load(places + token) == place)  # an empty place repeats a row
    slot, length = tl.load(starts + prompt), tl.load(lengths + prompt).to(tl.int32)
    size = tl.maximum(tl.cdiv(tl.cdiv(length, MOST_SPANS), KEYS) * KEYS, SPAN)
    first, last = span * size, tl.minimum(length, span * size + size)
    at = tl.arange(0, HALF_BLOCK)[None, :]
    mask, turns = inside[:, None] & (at < HALF), token[:, None] * 2 * HALF
    source = qkv + (token * kv_heads * (GROUPS + 2) + head)[:, None] * 2 * HALF + at
    q_a, q_b = _halves(source, mask, HALF)
    q_a, q_b = turned(q_a, q_b, q_norm, cos + turns, sin + turns, at, eps, HAS_NORMS, HALF)
    q_a, q_b = q_a.to(qkv.dtype.element_ty), q_b.to(qkv.dtype.element_ty)
    peak, total = tl.zeros([QUERIES], tl.float32) - float("inf"), tl.zeros([QUERIES], tl.float32)
    sum_a, sum_b = tl.zeros([QUERIES, HALF_BLOCK], tl.float32), tl.zeros([QUERIES, HALF_BLOCK], tl.float32)
    for start in range(first, last, KEYS):
        peak, total, sum_a, sum_b = _extended(
            peak, total, sum_a, sum_b, q_a, q_b, start, last, slot, store, store_stride, pages, pages_stride, kv_heads,
            kv_head, scale, HALF, HALF_BLOCK, PAGE, KEYS,
        )  # fmt: skip
    part = (span * rows + token) * kv_heads * GROUPS + head
    tl.store(part_lse + part, peak + tl.log(total), mask=exists)  # -inf of no keys
    to, mask = parts + part[:, None] * 2 * HALF + at, mask & exists[:, None] & (first < last)
    tl.store(to, sum_a / total[:, None], mask=mask)
    tl.store(to + HALF, sum_b / total[:, None], mask=mask)


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
