"""Attention of decode rows: each row's newest token against its group's prompt and its own slot.

Attention over prefix and own part is computed separately and merged exactly. The prefix enters the softmax of the own part as
one more key. Its score is the log-sum-exp of the prefix's scores, and its value is the prefix's output. The rows of a
group go through the prefix in one block of queries, so its keys are read once per group, not per sample. A copy of
the prompt in every slot would be read n times (and take n times the memory). Query heads that share a key head are folded
into the query axis, for the same reason.

Buffers and views are made when the rows change and every 16 tokens, not in every step and layer: at few rows a decode step
costs as much in calls from Python as in arithmetic.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from verl.models.attention import Scoring
from verl.models.delta_net import States
from verl.rollout.native.torch.kv_cache import SlotStore, rounded
from verl.rollout.native.torch.partial_attention import OwnPart, additive_mask, attend_part, stack_blocks

_MIN_BLOCK = 8  # rows: below this a separate kernel call costs more than the padding it saves
_BLOCK_RATIO = 0.6  # a block ends if all further rows are shorter than this share of its longest row

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


class Members:
    """The prefix slot of each decode row; changes only when a sample starts or ends.

    `slots` [rows] names the prefix slot of each row, `lengths` [slots] the tokens of each.
    """

    def __init__(self, slots: np.ndarray, lengths: np.ndarray, device: torch.device):
        num_slots = int(slots.max()) + 1
        order = np.argsort(slots, kind="stable")
        counts = np.bincount(slots, minlength=num_slots)
        width, places = int(counts.max()), np.empty(len(slots), dtype=np.int64)
        places[order] = np.arange(len(slots)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.blocks = length_blocks(lengths[:num_slots])
        place = slots * width + places
        rows = np.zeros((num_slots, width), dtype=np.int64)  # a hole repeats row 0, and is not read back
        rows.reshape(-1)[place] = np.arange(len(slots))
        self.rows = rows
        self.lengths = lengths[:num_slots]
        self.identity = rows.size == len(slots) and bool((place == np.arange(len(slots))).all())
        self.rows_index = torch.from_numpy(rows.reshape(-1)).to(device)
        self.place_index = torch.from_numpy(place).to(device)


Pair = tuple[torch.Tensor, torch.Tensor]


class _Layer(NamedTuple):
    """A layer's stores, and the parts of them that the blocks of rows and of prompts read."""

    keys: torch.Tensor
    values: torch.Tensor
    row_parts: list[Pair]
    prefix: list[Pair]


class DecodeRows:
    """Attention of rows 0 .. num_rows-1 of the row store, a store with keys as columns. `members` is None if each row has its
    prompt in its own slot. Valid until a sample starts or ends; `advance` comes before each forward."""

    def __init__(
        self, rows: SlotStore, prefix: SlotStore, num_rows: int, members: Members | None, device: torch.device
    ):
        self.num_rows, self._members = num_rows, members
        self._row_store, self._prefix, self._device = rows, prefix, device
        self._slots = torch.arange(num_rows, device=device)
        self._newest = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._made_for: tuple[object, ...] = ()
        self._kinds: dict[tuple[object, ...], _Kind] = {}
        self._layers: dict[int, _Layer] = {}

    def advance(self, own_lengths: np.ndarray, positions: np.ndarray) -> None:
        """Begin a forward. `own_lengths` int64 [rows]: tokens of each row in the row store before it; the store has room for
        one more. `positions` int64 [rows]: position of each row's new token in its sequence."""
        blocks = [(a, b, rounded(n)) for a, b, n in length_blocks(own_lengths + 1)]
        made_for = (blocks, self._row_store.version, self._prefix.version)
        if made_for != self._made_for:
            self._blocks, self._made_for = blocks, made_for
            self._kinds.clear()
            self._layers.clear()
        self._newest.copy_(torch.from_numpy(own_lengths))
        for kind in self._kinds.values():
            kind.advance(self._newest, positions)
        self._positions = positions

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """Store k and v [rows, kv_heads, head_dim], and attend with q [rows, heads, head_dim]. Returns [rows, heads,
        head_dim] in a buffer that the next call overwrites."""
        key = (scoring.window, q.shape, k.shape, v.shape, q.dtype)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind(self._blocks, self._members, q, k, v, scoring.window)
            kind.advance(self._newest, self._positions)
        held = self._layers.get(layer)
        if held is None:
            held = self._layers[layer] = self._hold(layer, kind, k, v)
        # for columns faster than a copy to a slice, whether lengths are equal or not
        torch.ops.aten.index_put_(held.keys, [self._slots, None, None, self._newest], k)
        torch.ops.aten.index_put_(held.values, [self._slots, None, self._newest], v)
        return kind.attend(q, held, scoring)

    def states(self, layer: int, first: States) -> States:
        """The states of the rows; see SlotStore."""
        return [state[: self.num_rows] for state in self._row_store.states(layer, first)]

    def _hold(self, layer: int, kind: _Kind, k: torch.Tensor, v: torch.Tensor) -> _Layer:
        keys, values = self._row_store.tensors(layer, k, v)
        prefix: list[Pair] = []
        if kind.prefix is not None:
            stored = self._prefix.tensors(layer, k, v)
            prefix = [(stored[0][a:b, :, :n], stored[1][a:b, :, :n]) for a, b, n in kind.prefix.blocks]
        return _Layer(keys, values, [part.matrices(keys, values) for part in kind.row_parts], prefix)


class _Kind:
    """The parts that layers of equal shapes and window share."""

    def __init__(
        self,
        blocks: list[Block],
        members: Members | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        window: int | None,
    ):
        rows, heads, head_dim = q.shape
        kv_heads, groups = k.shape[1], heads // k.shape[1]
        queries = q.new_empty(rows, kv_heads, groups, head_dim)
        out = q.new_empty(rows, kv_heads, groups, v.shape[2])
        self._queries, self._out = queries.flatten(1, 2), out.flatten(1, 2)
        self.prefix = None if members is None else _PrefixPart(members, queries, window)
        self.row_parts = [OwnPart(block, queries, out, window, members is not None) for block in blocks]

    def advance(self, newest: torch.Tensor, positions: np.ndarray) -> None:
        for part in self.row_parts:
            part.set_lengths(newest)
        if self.prefix is not None:
            self.prefix.set_positions(positions)

    def attend(self, q: torch.Tensor, layer: _Layer, scoring: Scoring) -> torch.Tensor:
        torch.mul(q, scoring.scale, out=self._queries)
        prefix = None if self.prefix is None else self.prefix.attend(layer.prefix, scoring.softcap)
        for part, (keys, values) in zip(self.row_parts, layer.row_parts, strict=True):
            part.attend(keys, values, prefix, scoring.softcap)
        return self._out


class _PrefixPart:
    """Attention of `queries` [rows, kv_heads, groups, head_dim], scaled, to the prompt of each row's group."""

    def __init__(self, members: Members, queries: torch.Tensor, window: int | None):
        self._members, self._queries, self._window = members, queries, window
        self.blocks = members.blocks
        self._places = members.rows.shape  # (slots, width)
        _, kv_heads, groups, head_dim = queries.shape
        slots, width = self._places
        self._groups, self._device = groups, queries.device
        by_slot = queries.new_empty(slots, kv_heads, width, groups, head_dim)
        self._by_place = by_slot.transpose(1, 2)
        self._by_slot = by_slot.flatten(2, 3)
        self._masks: list[torch.Tensor | None] = [self._mask(block, None, None) for block in self.blocks]

    def set_positions(self, positions: np.ndarray) -> None:
        """Set the positions of the newest tokens, int64 [rows]. With a window they decide the visible part of the prompt."""
        if self._window is not None and positions.max() >= self._window:
            self._masks = [self._mask(block, self._window, positions) for block in self.blocks]

    def attend(self, blocks: list[Pair], softcap: float | None) -> Pair:
        """Output [rows, kv_heads, groups, head_dim] and log-sum-exp [rows, kv_heads, groups]."""
        members = self._members
        rows = self._queries if members.identity else self._queries.index_select(0, members.rows_index)
        self._by_place.copy_(rows.unflatten(0, self._places))
        scoring, parts = Scoring(1.0, None, softcap), []
        for (start, end, _), (keys, values), mask in zip(self.blocks, blocks, self._masks, strict=True):
            parts.append(attend_part(self._by_slot[start:end], keys, values, mask, scoring))
        out, lse = stack_blocks(parts)
        # both come out of the kernel with memory in the order [slot, query, kv_head]; keep to it
        num_places = len(members.rows_index)
        out = out.transpose(1, 2).reshape(num_places, self._groups, *out.shape[1::2])
        lse = lse.transpose(1, 2).reshape(num_places, self._groups, -1)
        if not members.identity:
            out, lse = out.index_select(0, members.place_index), lse.index_select(0, members.place_index)
        return out.transpose(1, 2), lse.transpose(1, 2)

    def _mask(self, block: Block, window: int | None, positions: np.ndarray | None) -> torch.Tensor | None:
        """[slots, 1, members * groups, tokens], or [slots, 1, 1, tokens] without a window, or None when all is seen."""
        start, end, longest = block
        lengths = self._members.lengths[start:end]
        if window is None and (lengths == longest).all():
            return None
        token = torch.arange(longest, device=self._device)
        visible = (token < torch.from_numpy(lengths).to(self._device)[:, None])[:, None]
        if window is not None and positions is not None:
            at = torch.from_numpy(positions[self._members.rows[start:end]]).to(self._device)
            visible = (visible & (token > at[:, :, None] - window)).repeat_interleave(self._groups, dim=1)
        return additive_mask(visible, self._queries.dtype)[:, None]
