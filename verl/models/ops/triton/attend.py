"""Attention of a decode step by Triton. A program has the queries that read one key head, and goes through a span of their
keys once. The spans of a row depend on its length only, so its sums have one order whatever the other rows are."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from verl.models.ops.decoding import MOST_SPANS as _MOST_SPANS
from verl.models.ops.decoding import SPAN as _SPAN
from verl.models.ops.triton.overlap import overlap, start_next, wait
from verl.models.ops.triton.rotary import turned

_KEYS = 64  # of a pass through the loop
_MOST_QUERIES = 32 if torch.version.hip else 64  # of a program; 64 are more than the registers of an MI300 hold
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
    max_keys: int,
    pages: torch.Tensor | None,
    page_size: int,
    longest: int,
    window: int,
    scale: float,
    prompt_store: torch.Tensor | None = None,
    prompt_starts: torch.Tensor | None = None,
    prompt_lengths: torch.Tensor | None = None,
    max_prompt_keys: int = 0,
    prompt_pages: torch.Tensor | None = None,
    prompt_page_size: int = 0,
    gather: torch.Tensor | None = None,
    place: torch.Tensor | None = None,
) -> torch.Tensor:
    """See verl.models.ops.decoding. The first kernel attends to spans of the prompts and of long rows, many at a time. The
    second attends to the first span of each row, at the same time if kernels overlap, and adds the others in their order."""
    qkv, cos, sin = (x.contiguous() for x in (qkv, cos, sin))
    kv_heads, head_dim = store.shape[-2:]
    rows, num_heads = len(qkv), qkv.shape[-1] // head_dim - 2 * kv_heads
    groups = num_heads // kv_heads
    out = qkv.new_empty(rows, num_heads, head_dim)
    if not rows:
        return out
    least = max(triton.next_power_of_2(groups), _LEAST)
    parts, part_lse, spans, width, programs, queries = None, None, 0, 0, 0, least
    own_slots, prompt_slots = _slots(store, starts, lengths, pages), _slots(None, None, None, None)
    further = max(min(triton.cdiv(longest, _SPAN), _MOST_SPANS) - 1, 0)  # spans of a row after its first
    if prompt_store is not None:
        assert prompt_starts is not None and gather is not None  # noqa: PT018
        prompt_slots = _slots(prompt_store, prompt_starts, prompt_lengths, prompt_pages)
        spans, width = min(triton.cdiv(max_prompt_keys, _SPAN), _MOST_SPANS), len(gather) // len(prompt_starts)
        queries = min(max(triton.next_power_of_2(width * groups), _LEAST), _MOST_QUERIES)
        programs = len(prompt_starts) * kv_heads * triton.cdiv(width * groups, queries) * spans
    if spans or further:
        parts = qkv.new_empty(spans + further, rows, num_heads, head_dim, dtype=torch.float32)
        part_lse = qkv.new_empty(spans + further, rows, num_heads, dtype=torch.float32)
        warps = max(min(queries // 8, _MOST_WARPS), _OWN_WARPS if further else 1)
        _spans_kernel[(programs + rows * kv_heads * further,)](
            qkv, cos, sin, q_norm, parts, part_lse, *prompt_slots, *own_slots, gather, place, rows, kv_heads, width, programs,
            eps, scale, window, HAS_NORMS=q_norm is not None, HAS_WINDOW=window > 0, SPANS=spans, FURTHER=further,
            GROUPS=groups, QUERIES=queries, PROMPT_PAGE=prompt_page_size, num_warps=warps, **_shape(qkv, head_dim, page_size),
        )  # fmt: skip
    _rows_kernel[(rows, kv_heads)](
        qkv, cos, sin, q_norm, k_norm, out, *own_slots, parts, part_lse, gather, place, rows, kv_heads, eps, scale, window,
        HAS_NORMS=q_norm is not None, HAS_WINDOW=window > 0, SPANS=spans, FURTHER=further, GROUPS=groups, QUERIES=least,
        num_warps=_OWN_WARPS, **_shape(qkv, head_dim, page_size),
    )  # fmt: skip
    return out


def _slots(
    store: torch.Tensor | None, starts: torch.Tensor | None, lengths: torch.Tensor | None, pages: torch.Tensor | None
) -> tuple[torch.Tensor | int | None, ...]:
    assert store is None or store[0].is_contiguous()
    assert pages is None or pages.is_contiguous()
    return (
        store,
        0 if store is None else store.stride(0),
        starts,
        lengths,
        pages,
        0 if pages is None else pages.stride(0),
    )


def _shape(qkv: torch.Tensor, head_dim: int, page_size: int) -> dict[str, object]:
    block = max(triton.next_power_of_2(head_dim // 2), _LEAST)
    sizes = {"SPAN": _SPAN, "MOST_SPANS": _MOST_SPANS, "KEYS": _KEYS}
    return {"HALF": head_dim // 2, "HALF_BLOCK": block, "PAGE": page_size, **sizes, **overlap(qkv)}


@triton.jit
def _rows_kernel(
    qkv, cos, sin, q_norm, k_norm, out, store, store_stride, starts, lengths, pages, pages_stride, parts, part_lse, gather,
    places, rows, kv_heads, eps, scale, window, HAS_NORMS: tl.constexpr, HAS_WINDOW: tl.constexpr, SPANS: tl.constexpr,
    FURTHER: tl.constexpr, GROUPS: tl.constexpr, QUERIES: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
    PAGE: tl.constexpr, SPAN: tl.constexpr, MOST_SPANS: tl.constexpr, KEYS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    if not SPANS + FURTHER:
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
    size = _span_size(length - first, SPAN, MOST_SPANS, KEYS)
    last = tl.minimum(length, first + size)
    for start in range(first, last, KEYS):
        peak, total, sum_a, sum_b = _extended(
            peak, total, sum_a, sum_b, q_a, q_b, start, last, slot, store, store_stride, pages, pages_stride, kv_heads,
            kv_head, scale, HALF, HALF_BLOCK, PAGE, KEYS,
        )  # fmt: skip
    if SPANS + FURTHER:
        wait(OVERLAPS)
    if SPANS:
        has_prompt = tl.load(gather + tl.load(places + token)) == token
        for span in tl.static_range(SPANS):
            part = (span * rows + token) * num_heads + head
            lse = tl.load(part_lse + part, mask=group < GROUPS, other=float("-inf"))
            lse = tl.where(has_prompt, lse, float("-inf"))  # -inf of no keys too: a shorter prompt has fewer spans
            peak, total, sum_a, sum_b = _added(peak, total, sum_a, sum_b, parts, part, lse, at, mask, HALF)
    if FURTHER:
        for span in range(1, tl.cdiv(length - first, size)):
            part = ((SPANS + span - 1) * rows + token) * num_heads + head
            lse = tl.load(part_lse + part, mask=group < GROUPS, other=float("-inf"))
            peak, total, sum_a, sum_b = _added(peak, total, sum_a, sum_b, parts, part, lse, at, mask, HALF)
    to = out + (token * num_heads + head)[:, None] * 2 * HALF + at
    tl.store(to, (sum_a / total[:, None]).to(out.dtype.element_ty), mask=mask)
    tl.store(to + HALF, (sum_b / total[:, None]).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _spans_kernel(
    qkv, cos, sin, q_norm, parts, part_lse, prompt_store, prompt_stride, prompt_starts, prompt_lengths, prompt_pages,
    prompt_pages_stride, store, store_stride, starts, lengths, pages, pages_stride, gather, places, rows, kv_heads, width,
    programs, eps, scale, window, HAS_NORMS: tl.constexpr, HAS_WINDOW: tl.constexpr, SPANS: tl.constexpr,
    FURTHER: tl.constexpr, GROUPS: tl.constexpr, QUERIES: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
    PROMPT_PAGE: tl.constexpr, PAGE: tl.constexpr, SPAN: tl.constexpr, MOST_SPANS: tl.constexpr, KEYS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The first `programs` have spans of prompts, each for the rows that share it. The others have spans of rows."""
    wait(OVERLAPS)
    start_next(OVERLAPS)
    program, query = tl.program_id(0), tl.arange(0, QUERIES)
    if SPANS:
        if program < programs:
            span, block = program % SPANS, program // SPANS
            blocks = tl.cdiv(width * GROUPS, QUERIES)
            kv_head, prompt = block // blocks % kv_heads, (block // blocks // kv_heads).to(tl.int64)
            query += block % blocks * QUERIES
            place, inside = prompt * width + query // GROUPS, query < width * GROUPS
            token = tl.load(gather + place, mask=inside, other=0)
            exists = inside & (tl.load(places + token) == place)  # an empty place repeats a row
            slot, length = tl.load(prompt_starts + prompt), tl.load(prompt_lengths + prompt).to(tl.int32)
            size = _span_size(length, SPAN, MOST_SPANS, KEYS)
            _attend_span(
                qkv, cos, sin, q_norm, parts, part_lse, prompt_store, prompt_stride, prompt_pages, prompt_pages_stride, token,
                query % GROUPS, exists, slot, span * size, tl.minimum(length, span * size + size), span, rows, kv_heads,
                kv_head, eps, scale, HAS_NORMS, GROUPS, QUERIES, HALF, HALF_BLOCK, PROMPT_PAGE, KEYS,
            )  # fmt: skip
    if FURTHER:
        if program >= programs:
            span, row = (program - programs) % FURTHER, (program - programs) // FURTHER
            kv_head, row = row % kv_heads, (row // kv_heads).to(tl.int64)
            slot, length = tl.load(starts + row), tl.load(lengths + row).to(tl.int32)
            before = tl.maximum(length + 1 - window, 0) if HAS_WINDOW else length * 0
            size = _span_size(length - before, SPAN, MOST_SPANS, KEYS)
            first = before + (span + 1) * size
            if first < length:
                _attend_span(
                    qkv, cos, sin, q_norm, parts, part_lse, store, store_stride, pages, pages_stride, row + query * 0, query,
                    query < GROUPS, slot, first, tl.minimum(length, first + size), SPANS + span, rows, kv_heads, kv_head, eps,
                    scale, HAS_NORMS, GROUPS, QUERIES, HALF, HALF_BLOCK, PAGE, KEYS,
                )  # fmt: skip


@triton.jit
def _span_size(keys, SPAN: tl.constexpr, MOST_SPANS: tl.constexpr, KEYS: tl.constexpr):
    """Keys of a span of a sequence of `keys`: SPAN, or in longer sequences a MOST_SPANS-th of them."""
    return tl.maximum(tl.cdiv(tl.cdiv(keys, MOST_SPANS), KEYS) * KEYS, SPAN)


@triton.jit
def _attend_span(
    qkv, cos, sin, q_norm, parts, part_lse, store, store_stride, pages, pages_stride, token, group, exists, slot, first, last,
    span, rows, kv_heads, kv_head, eps, scale, HAS_NORMS: tl.constexpr, GROUPS: tl.constexpr, QUERIES: tl.constexpr,
    HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Part number `span` of the queries `group` [QUERIES] of the rows `token` [QUERIES]: keys `first` to `last` of a slot."""
    head, at = kv_head * GROUPS + group, tl.arange(0, HALF_BLOCK)[None, :]
    mask, turns = exists[:, None] & (at < HALF), token[:, None] * 2 * HALF
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
    to, mask = parts + part[:, None] * 2 * HALF + at, mask & (first < last)
    tl.store(to, sum_a / total[:, None], mask=mask)
    tl.store(to + HALF, sum_b / total[:, None], mask=mask)


@triton.jit
def _added(peak, total, sum_a, sum_b, parts, part, lse, at, mask, HALF: tl.constexpr):
    """The softmax with a part of other keys, whose log-sum-exp is `lse`. A part of no keys is not written."""
    exists, source = (lse > float("-inf"))[:, None], parts + part[:, None] * 2 * HALF + at
    part_a = tl.where(exists, tl.load(source, mask=mask, other=0.0), 0.0)
    part_b = tl.where(exists, tl.load(source + HALF, mask=mask, other=0.0), 0.0)
    top = tl.maximum(peak, lse)
    share, weight = tl.exp(peak - top), tl.exp(lse - top)
    sum_a = sum_a * share[:, None] + part_a * weight[:, None]
    sum_b = sum_b * share[:, None] + part_b * weight[:, None]
    return top, total * share + weight, sum_a, sum_b


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
