"""The order of prompts: a pure function of (seed, epoch), so that a run can be resumed at any prompt without state."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@lru_cache(maxsize=4)
def _permutation(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    # raw 64-bit samples and a stable sort: unlike Generator.permutation, both stay the same across versions of numpy
    keys = np.random.Philox(key=np.array([seed % 2**64, epoch], dtype=np.uint64)).random_raw(num_rows)
    return np.argsort(keys, kind="stable")


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
        return epoch, int(_permutation(self.num_rows, self.seed, epoch)[place]) if self.shuffle else place
