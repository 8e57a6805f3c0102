"""The tokens of one forward for the compiled decoder: the keys that each token sees, and the tiles that share a prompt."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verl.models.routing import Routing
from verl.rollout.layout import Chunk
from verl.rollout.native.compiled.store import BlockStore


class DecodeTiles:
    """The decode rows of a forward, sorted by prompt, so that several rows read the keys of a prompt together. Valid until a
    sample starts or ends.

    `rows` (int64 [rows]) are slots of the row store. `slots` and `lengths` (int64 [rows]) are the slot of each row's prompt in
    the prefix store and its tokens; both are None if each row has its prompt in its own slot.
    """

    def __init__(self, rows: np.ndarray, slots: np.ndarray | None, lengths: np.ndarray | None, max_tile: int):
        self.rows = rows
        self.slots = np.full(len(rows), -1) if slots is None else slots
        self.lengths = np.zeros(len(rows), dtype=np.int64) if lengths is None else lengths
        self.order = np.argsort(self.slots, kind="stable")
        self.starts = _starts(self.slots[self.order], 1 if slots is None else max_tile)


@dataclass
class StepTokens:
    """[decode rows | tokens of prompt chunks]; every array but `tiles` has an int64 per token, see `struct step`. `routing`
    records experts, if given."""

    row_store: BlockStore
    prefix: BlockStore
    position: np.ndarray
    prefix_slot: np.ndarray
    prefix_end: np.ndarray
    own_slot: np.ndarray
    own_end: np.ndarray
    order: np.ndarray
    tiles: np.ndarray
    routing: Routing | None = None

    @classmethod
    def of(
        cls,
        stores: tuple[BlockStore, BlockStore],
        rows: DecodeTiles,
        own_lengths: np.ndarray,
        positions: np.ndarray,
        chunks: Sequence[Chunk],
        max_tile: int,
    ) -> StepTokens:
        """`stores` are the row and the prefix store. `own_lengths` and `positions` (int64 [rows]) describe the decode rows
        before this forward."""
        num_rows = len(positions)
        new = [np.arange(p.start, p.end) for p in chunks]
        ends = num_rows + np.cumsum([0, *map(len, new)])
        chunk_tiles = [np.arange(a, b, max_tile) for a, b in itertools.pairwise(ends)]
        num_new = ends[-1] - num_rows
        return cls(
            *stores,
            position=np.concatenate([positions, *new]),
            prefix_slot=np.concatenate(
                [rows.slots, *(np.full(len(n), p.slot) for n, p in zip(new, chunks, strict=True))]
            ),
            prefix_end=np.concatenate([rows.lengths, *(n + 1 for n in new)]),
            own_slot=np.concatenate([rows.rows, np.full(num_new, -1)]),
            own_end=np.concatenate([own_lengths + 1, np.zeros(num_new, dtype=np.int64)]),
            order=np.concatenate([rows.order, np.arange(num_rows, ends[-1])]),
            tiles=np.concatenate([rows.starts, *chunk_tiles, ends[-1:]]),
        )


def _starts(slots: np.ndarray, max_length: int) -> np.ndarray:
    """Start indices of runs of equal `slots`; a run longer than `max_length` is cut."""
    runs = np.flatnonzero(np.diff(slots, prepend=-2))
    rank = np.arange(len(slots)) - np.repeat(runs, np.diff(runs, append=len(slots)))
    return np.flatnonzero(rank % max_length == 0)
