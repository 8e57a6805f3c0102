"""The order of prompts: a pure function of (seed, epoch), so that a run can be resumed at any prompt without state."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

# A permutation of up to so many rows is a table, as in all versions. Larger ones, of 64 MiB and more for each epoch, are
# computed place by place.
NUM_LISTED = 1 << 23
_ROUNDS = 8
_WORD = (1 << 64) - 1


@lru_cache(maxsize=4)
def _permutation(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    # raw 64-bit samples and a stable sort: unlike Generator.permutation, both stay the same across versions of numpy
    keys = np.random.Philox(key=np.array([seed % 2**64, epoch], dtype=np.uint64)).random_raw(num_rows)
    return np.argsort(keys, kind="stable")


def _keyed_place(num_rows: int, seed: int, epoch: int, place: int) -> int:
    """The row at a place of the epoch, by a Feistel network, which permutes the numbers of 2 * `half` bits without a table.
    Numbers that are no rows are mapped again (Black and Rogaway, 2002, "Ciphers with Arbitrary Finite Domains")."""
    half = ((num_rows - 1).bit_length() + 1) // 2
    mask, keys = (1 << half) - 1, _round_keys(seed, epoch)
    while True:
        left, right = place >> half, place & mask
        for key in keys:
            mixed = ((right ^ key) * 0xBF58476D1CE4E5B9) & _WORD  # the finalizer of SplitMix64
            mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _WORD
            left, right = right, left ^ ((mixed ^ (mixed >> 31)) & mask)
        place = left << half | right
        if place < num_rows:
            return place


@lru_cache(maxsize=4)
def _round_keys(seed: int, epoch: int) -> list[int]:
    keys: list[int] = (
        np.random.Philox(key=np.array([seed % 2**64, epoch], dtype=np.uint64)).random_raw(_ROUNDS).tolist()
    )
    return keys


@dataclass(frozen=True)
class PromptOrder:
    """Maps a prompt index to its row. With `shuffle` each epoch has a different order, keyed by (seed, epoch).

    Every epoch leaves out its incomplete last batch of `batch_size` prompts, so that all its batches are complete. With
    `shuffle` these are other rows in each epoch.
    """

    num_rows: int
    seed: int
    shuffle: bool
    batch_size: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size <= self.num_rows:
            raise ValueError(f"Batches of {self.batch_size} prompts cannot be made of {self.num_rows} rows.")

    @property
    def rows_per_epoch(self) -> int:
        return self.num_rows - self.num_rows % self.batch_size

    def row(self, ordinal: int) -> tuple[int, int]:
        """(epoch, row) of prompt index `ordinal`; all three count from 0."""
        epoch, place = divmod(ordinal, self.rows_per_epoch)
        if not self.shuffle:
            return epoch, place
        if self.num_rows > NUM_LISTED:
            return epoch, _keyed_place(self.num_rows, self.seed, epoch, place)
        return epoch, int(_permutation(self.num_rows, self.seed, epoch)[place])
