"""Who sees whom in one forward of the native engine: decode rows against their caches, prompt pieces against theirs.

    tokens of a forward   [ decode row 0 .. R-1 | piece of prompt a | piece of prompt b | ... ]
    keys of a decode row  prefix store, slot of its group (the prompt, stored once)  +  own store, slot = row (its response)

Attention over prefix and own part is computed apart and merged exactly by log-sum-exp. The rows of a group go through the
prefix in one block of queries, so its keys are read once per group and not once per sample; a copy of the prompt in every
slot would be read n times (and take n times the memory). Query heads that share a key head are folded into the query axis,
for the same reason.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from verl.rollout.cache import SlotStore
from verl.rollout.partial_attention import Scoring, additive_mask, attend_part, attend_plain, merge, stack_blocks

_MIN_BLOCK = 8  # rows: below this a kernel call of its own costs more than the padding it saves
_BLOCK_RATIO = 0.6  # a block is cut where all that follows is shorter than this share of its longest

Block = tuple[int, int, int]  # first row, last row + 1, longest length


def length_blocks(lengths: np.ndarray) -> list[Block]:
    """Cut rows into runs of similar length, so that short rows are not padded to long ones. Rows that come in descending
    length give the best cuts; any order is correct."""
    longest_after = np.maximum.accumulate(lengths[::-1])[::-1]
    blocks, start, longest = [], 0, 0
    for i, length in enumerate(lengths.tolist()):
        if i - start >= _MIN_BLOCK and longest_after[i] <= _BLOCK_RATIO * longest:
            blocks.append((start, i, longest))
            start, longest = i, 0
        longest = max(longest, length)
    return [*blocks, (start, len(lengths), longest)]


@dataclass(frozen=True)
class Piece:
    """Tokens [start, end) of a prompt that are computed in this forward; they go to `slot` of the prefix store."""

    slot: int
    start: int
    end: int


class Members:
    """Which decode rows belong to which prefix slot; changes only when a sample starts or ends.

    `slots` [rows] names the prefix slot of each row, `lengths` [slots] the tokens of each.
    """

    def __init__(self, slots: np.ndarray, lengths: np.ndarray, device: torch.device):
        num_slots = int(slots.max()) + 1
        order = np.argsort(slots, kind="stable")
        counts = np.bincount(slots, minlength=num_slots)
        rank = np.arange(len(slots)) - np.repeat(np.cumsum(counts) - counts, counts)
        width = int(counts.max())
        place = np.empty(len(slots), dtype=np.int64)
        place[order] = slots[order] * width + rank
        rows = np.zeros((num_slots, width), dtype=np.int64)  # a hole repeats row 0, and is not read back
        rows.reshape(-1)[place] = np.arange(len(slots))
        self.rows = rows
        self.lengths = lengths[:num_slots]
        self.blocks = length_blocks(self.lengths)
        self.identity = rows.size == len(slots) and bool((place == np.arange(len(slots))).all())
        self.rows_index = torch.from_numpy(rows.reshape(-1)).to(device)
        self.place_index = torch.from_numpy(place).to(device)


class StepLayout:
    """The layout of one forward (see the head of this file); `attend` is what each attention layer calls.

    `own_lengths` int64 [rows]: tokens in the own store before this forward. `positions` int64 [rows]: position of each
    row's new token in its sequence. `members` is None when rows have no prefix (their prompt lies in their own slot).
    """

    def __init__(
        self,
        own: SlotStore,
        prefix: SlotStore,
        own_lengths: np.ndarray,
        positions: np.ndarray,
        members: Members | None,
        pieces: list[Piece],
        device: torch.device,
    ):
        self._own, self._prefix, self._pieces, self._device = own, prefix, pieces, device
        self._own_lengths, self._positions, self._members = own_lengths, positions, members
        self._num_rows = len(own_lengths)
        self._masks: dict[tuple[str, int, int | None], torch.Tensor | None] = {}
        if self._num_rows:
            self._blocks = length_blocks(own_lengths + 1)
            self._slots = torch.arange(self._num_rows, device=device)
            self._ends = torch.from_numpy(own_lengths.copy()).to(device)
            self._equal_end = int(own_lengths[0]) if (own_lengths == own_lengths[0]).all() else None
            self._last_position = int(positions.max())

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None,
        sliding_window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """See AttentionLayout: q [1, heads, tokens, head_dim] -> [1, tokens, heads, head_dim]. Stores k and v."""
        scoring = Scoring(q.shape[-1] ** -0.5 if scale is None else scale, sliding_window, softcap)
        start, parts = self._num_rows, []
        if start:
            parts.append(self._decode(layer, q[:, :, :start], k[:, :, :start], v[:, :, :start], scoring))
        for piece in self._pieces:
            tokens = slice(start, start + piece.end - piece.start)
            parts.append(self._prefill(layer, piece, q[:, :, tokens], k[:, :, tokens], v[:, :, tokens], scoring))
            start = tokens.stop
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _prefill(
        self,
        layer: int,
        piece: Piece,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scoring: Scoring,
    ) -> torch.Tensor:
        keys, values = self._prefix.tensors(layer, k, v)
        keys[piece.slot, :, piece.start : piece.end] = k[0]
        values[piece.slot, :, piece.start : piece.end] = v[0]
        if piece.start:
            k, v = keys[piece.slot, None, :, : piece.end], values[piece.slot, None, :, : piece.end]
        groups = q.shape[1] // k.shape[1]
        if scoring.softcap is not None:
            folded = q.unflatten(1, (-1, groups)).flatten(2, 3)
            mask = additive_mask(self._causal(piece, scoring.window), q.dtype).repeat(groups, 1)
            out, _ = attend_plain(folded, k, v, mask, scoring)
            return out.unflatten(2, (groups, -1)).flatten(1, 2).transpose(1, 2)
        whole = not piece.start and (scoring.window is None or piece.end <= scoring.window)
        visible = None if whole else self._causal(piece, scoring.window)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=whole, scale=scoring.scale, enable_gqa=groups > 1
        )
        return out.transpose(1, 2)

    def _causal(self, piece: Piece, window: int | None) -> torch.Tensor:
        """bool [tokens of the piece, tokens so far]: which keys each token sees."""
        query = torch.arange(piece.start, piece.end, device=self._device)[:, None]
        key = torch.arange(piece.end, device=self._device)
        visible = key <= query
        return visible if window is None else visible & (key > query - window)

    def _decode(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scoring: Scoring,
    ) -> torch.Tensor:
        rows, kv_heads = self._num_rows, k.shape[1]
        queries = q[0].transpose(0, 1).reshape(rows, kv_heads, q.shape[1] // kv_heads, q.shape[3])
        keys, values = self._own.tensors(layer, k, v)
        self._write(keys, k[0])
        self._write(values, v[0])
        parts = []
        for block, (a, b, n) in enumerate(self._blocks):
            mask = self._own_mask(block, scoring.window, q.dtype)
            parts.append(attend_part(queries[a:b], keys[a:b, :, :n], values[a:b, :, :n], mask, scoring))
        out, lse = stack_blocks(parts)
        if self._members is not None:
            out = merge(out, lse, *self._prefix_part(layer, queries, k, v, self._members, scoring))
        return out.reshape(1, rows, q.shape[1], -1)

    def _write(self, store: torch.Tensor, new: torch.Tensor) -> None:
        """`new` [kv_heads, rows, head_dim] behind what each row has."""
        if self._equal_end is not None:
            store[: self._num_rows, :, self._equal_end] = new.transpose(0, 1)
        else:
            store[self._slots, :, self._ends] = new.transpose(0, 1)

    def _prefix_part(
        self,
        layer: int,
        queries: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        members: Members,
        scoring: Scoring,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of `queries` [rows, kv_heads, groups, head_dim] to the prompt of each row's group: (out, lse)."""
        keys, values = self._prefix.tensors(layer, k, v)
        num_slots, width = members.rows.shape
        heads_per_key = queries.shape[2]
        gathered = queries if members.identity else queries.index_select(0, members.rows_index)
        by_slot = gathered.unflatten(0, (num_slots, width)).transpose(1, 2).flatten(2, 3)
        parts = []
        for block, (a, b, n) in enumerate(members.blocks):
            mask = self._prefix_mask(members, block, scoring.window, heads_per_key, queries.dtype)
            parts.append(attend_part(by_slot[a:b], keys[a:b, :, :n], values[a:b, :, :n], mask, scoring))
        out, lse = stack_blocks(parts)
        # both come out of the kernel with memory in the order [slot, query, kv_head]; keep to it
        out = out.transpose(1, 2).reshape(num_slots * width, heads_per_key, *out.shape[1::2])
        lse = lse.transpose(1, 2).reshape(num_slots * width, heads_per_key, -1)
        if not members.identity:
            out, lse = out.index_select(0, members.place_index), lse.index_select(0, members.place_index)
        return out.transpose(1, 2), lse.transpose(1, 2)

    def _own_mask(self, block: int, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """[rows, 1, 1, tokens], or None when every row of the block sees all of it; the same for all layers."""
        start, end, longest = self._blocks[block]
        window = window if window is not None and longest > window else None
        key = ("own", block, window)
        if key in self._masks:
            return self._masks[key]
        mask = None
        if window is not None or (self._own_lengths[start:end] + 1 < longest).any():
            newest = self._ends[start:end, None]
            token = torch.arange(longest, device=self._device)
            visible = token <= newest
            if window is not None:
                visible &= token > newest - window
            mask = additive_mask(visible, dtype)[:, None, None]
        self._masks[key] = mask
        return mask

    def _prefix_mask(
        self, members: Members, block: int, window: int | None, heads_per_key: int, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """[slots, 1, members * heads_per_key, tokens], or [slots, 1, 1, tokens] without an active window, or None."""
        start, end, longest = members.blocks[block]
        window = window if window is not None and self._last_position >= window else None
        key = ("prefix", block, window)
        if key in self._masks:
            return self._masks[key]
        mask = None
        lengths = members.lengths[start:end]
        if window is not None or (lengths < longest).any():
            token = torch.arange(longest, device=self._device)
            visible = (token < torch.from_numpy(lengths).to(self._device)[:, None])[:, None]
            if window is not None:
                at = torch.from_numpy(self._positions[members.rows[start:end]]).to(self._device)
                visible = (visible & (token > at[:, :, None] - window)).repeat_interleave(heads_per_key, dim=1)
            mask = additive_mask(visible, dtype)[:, None]
        self._masks[key] = mask
        return mask
