"""Decode rows in blocks: by similar length, and by the prompt that they share."""

from __future__ import annotations

import itertools

import numpy as np
import torch

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


def equal_blocks(lengths: np.ndarray) -> list[Block]:
    """Runs of one length: a row's block is then as long as the row, whatever stands beside it."""
    cuts = [0, *(np.flatnonzero(np.diff(lengths)) + 1).tolist(), len(lengths)]
    return [(start, end, int(lengths[start])) for start, end in itertools.pairwise(cuts)]


class Members:
    """Which decode rows belong to which prefix slot; changes only when a sample starts or ends.

    `slots` [rows] names the prefix slot of each row, `lengths` [slots] the tokens of each. With `places` (each row's number
    among the `width` samples of its prompt) a row is where its number says, whichever others still run.
    """

    def __init__(
        self,
        slots: np.ndarray,
        lengths: np.ndarray,
        device: torch.device,
        places: np.ndarray | None = None,
        width: int = 0,
    ):
        num_slots = int(slots.max()) + 1
        if places is None:
            order = np.argsort(slots, kind="stable")
            counts = np.bincount(slots, minlength=num_slots)
            width, places = int(counts.max()), np.empty(len(slots), dtype=np.int64)
            places[order] = np.arange(len(slots)) - np.repeat(np.cumsum(counts) - counts, counts)
            self.blocks = length_blocks(lengths[:num_slots])
        else:
            self.blocks = equal_blocks(lengths[:num_slots])
        place = slots * width + places
        rows = np.zeros((num_slots, width), dtype=np.int64)  # a hole repeats row 0, and is not read back
        rows.reshape(-1)[place] = np.arange(len(slots))
        self.rows = rows
        self.lengths = lengths[:num_slots]
        self.identity = rows.size == len(slots) and bool((place == np.arange(len(slots))).all())
        self.rows_index = torch.from_numpy(rows.reshape(-1)).to(device)
        self.place_index = torch.from_numpy(place).to(device)
