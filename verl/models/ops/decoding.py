"""Attention of a decode step as an op: a new token of each row against its prompt and the row's own tokens.

Triton computes it in two kernels on a GPU, without other operations between two matrix products. Its sums over keys have
one order per row, independent of the other rows. Elsewhere torch computes it, with flash attention if that runs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from verl.models.ops.pointwise import write_kv
from verl.models.ops.table import by_torch, op
from verl.models.ops.varlen import FLASH, TokenSpans, flash_runs

# keys of a sequence for one Triton program; longer sequences than MOST_SPANS of these have longer spans
SPAN, MOST_SPANS = 128, 16
HeadNorms = tuple[torch.Tensor | None, torch.Tensor | None, float]  # weights for queries and keys, and their eps


class Slots(NamedTuple):
    """Sequences of keys in a store [2, places, kv_heads, head_dim]. `starts` int64 [sequences] are the places of their first
    keys, or with `pages` (int32 [slots, pages], of `page_size` keys each) the numbers of their slots. `lengths` int64
    [sequences]; `max_keys` bounds the keys of a sequence in a generation, `longest` the keys of a sequence in this step, whose
    kernels have no programs for more. No sum depends on `longest`."""

    starts: torch.Tensor
    lengths: torch.Tensor
    max_keys: int
    pages: torch.Tensor | None = None
    page_size: int = 0
    longest: int = 0


@op(triton="attend:launch_attend", writes=("store",))
def attend_decode(
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
    slots = Slots(starts, lengths, max_keys, pages, page_size)
    places = _places(slots, lengths.unsqueeze(1), store)[:, 0]
    q = by_torch(write_kv)(qkv, cos, sin, q_norm, k_norm, eps, store, places)
    queries = q.unflatten(1, (store.shape[2], -1)).unsqueeze(1)
    token, own_lse = _attended(queries, store, slots._replace(lengths=lengths + 1), window, scale)
    out, lse = token.flatten(1, 3), own_lse.flatten(1)
    if prompt_store is None:
        return out
    assert prompt_starts is not None
    assert prompt_lengths is not None
    prompts = Slots(prompt_starts, prompt_lengths, max_prompt_keys, prompt_pages, prompt_page_size)
    queries = q[gather].unflatten(1, (store.shape[2], -1)).unflatten(0, (len(prompt_starts), -1))
    part, part_lse = _attended(queries, prompt_store, prompts, 0, scale)
    prompt_out, their_lse = part.flatten(0, 1)[place].flatten(1, 2), part_lse.flatten(0, 1)[place].flatten(1)
    share = torch.sigmoid(their_lse - lse).unsqueeze(-1)
    return (out + (prompt_out - out) * share).to(out.dtype)


def _attended(
    q: torch.Tensor, store: torch.Tensor, slots: Slots, window: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [sequences, queries, kv_heads, groups, head_dim] to all keys of the sequence (with `window`, the last so
    many): out like q, and the log-sum-exp of the scores [sequences, queries, kv_heads, groups]."""
    if flash_runs(q.device, q.dtype, q.shape[-1]):
        return _by_flash(q, store, slots, window, scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    at, lengths = torch.arange(slots.max_keys, device=q.device).unsqueeze(0), slots.lengths.unsqueeze(1)
    visible = at < lengths if not window else (at < lengths) & (at >= lengths - window)
    keys, values = store[:, _places(slots, at, store)].to(wide)
    scores = torch.einsum("sqkgd,stkd->sqkgt", q.to(wide), keys) * scale
    scores = scores.masked_fill(~visible[:, None, None, None], float("-inf"))
    return torch.einsum("sqkgt,stkd->sqkgd", scores.softmax(-1), values).to(q.dtype), scores.logsumexp(-1)


def _by_flash(
    q: torch.Tensor, store: torch.Tensor, slots: Slots, window: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A single query has its heads as they are. Several have one head for each key head, since flash reads keys once a head."""
    sequences, queries, _, groups, _ = q.shape
    tokens = q.flatten(0, 1).flatten(1, 2) if queries == 1 else q.transpose(2, 3).flatten(0, 2)
    each = len(tokens) // sequences
    spans = TokenSpans(
        torch.arange(sequences + 1, dtype=torch.int32, device=q.device) * each,
        torch.nn.functional.pad(slots.starts.int(), (0, 1)),
        each,
        slots.max_keys,
        slots.lengths.int(),
        None if slots.pages is None else slots.pages[slots.starts],
        slots.page_size,
        window or None,
    )
    out, lse = FLASH.forward(tokens, *store, spans, window > 0, scale)
    if queries == 1:
        return out.view(q.shape), lse.t().reshape(q.shape[:-1])
    apart = (sequences, queries, groups)
    return out.unflatten(0, apart).transpose(2, 3), lse.unflatten(1, apart).permute(1, 2, 0, 3)


def _places(slots: Slots, at: torch.Tensor, store: torch.Tensor) -> torch.Tensor:
    """int64 [sequences, n]: the places of the keys number `at` [sequences or 1, n]; any place for a number beyond a slot."""
    if slots.pages is None:
        return (slots.starts.unsqueeze(1) + at).clamp(max=store.shape[1] - 1)
    page = (at // slots.page_size).clamp(max=slots.pages.shape[1] - 1).expand(len(slots.starts), -1)
    return slots.pages[slots.starts].long().gather(1, page) * slots.page_size + at % slots.page_size


class SharedPrompts(NamedTuple):
    """The prompts of a step.

    The rows of a prompt go through its keys together, as places of one sequence: keys are read once per prompt and not once per
    sample. `gather` int64 [prompts * width] is the row in each place; an empty place repeats a row, and is not read back.
    `place` is int64 [rows]."""

    slots: Slots
    gather: torch.Tensor
    place: torch.Tensor


def attend_new_tokens(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: HeadNorms,
    store: torch.Tensor,
    slots: Slots,
    window: int | None,
    scale: float,
    prompt_store: torch.Tensor | None = None,
    shared: SharedPrompts | None = None,
) -> torch.Tensor:
    """Attention of the new token of each row to its prompt (in `prompt_store`), to the tokens of its slot and to itself.

    The token is stored, as by verl.models.ops.pointwise.write_kv, after the `lengths` tokens of its slot. `window` hides all
    tokens of a slot but the last so many. Returns [rows, heads, head_dim]; without gradient."""
    prompts: tuple[Any, ...] = () if shared is None else (prompt_store, *shared.slots[:-1], shared.gather, shared.place)
    arguments: tuple[Any, ...] = (qkv, cos, sin, *norms, store, *slots, window or 0, scale, *prompts)
    return attend_decode(*arguments)
