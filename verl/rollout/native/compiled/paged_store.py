"""A paged store of keys and values, on the memory pages of the operating system.

    slot 0  |██████████░░░░░░░░░░░░░░░░░░░|     █ tokens that are there, in pages of memory
    slot 1  |███░░░░░░░░░░░░░░░░░░░░░░░░░░|     ░ addresses without memory behind them
    slot 2  |░░░░░░░░░░░░░░░░░░░░░░░░░░░░░|

Memory is allocated by the first write to a page (see BlockStore) and freed when the slot's sample ends. So a short sample
takes no more than its length (vAttention, Prabhu et al. 2024, arXiv:2405.04437). The kernels read a sequence at consecutive
addresses, as ever.
"""

from __future__ import annotations

import mmap

import numpy as np
import torch

from verl.rollout.native.compiled.library import BLOCK
from verl.rollout.native.compiled.store import BlockStore, Shape

_PAGE = mmap.PAGESIZE


class PagedStore(BlockStore):
    """See BlockStore. `keep` says before each forward how many tokens every slot has."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self._maps: list[mmap.mmap] = []
        self._held = np.zeros(0, dtype=np.int64)  # blocks of each slot that may have memory

    def keep(self, lengths: np.ndarray) -> None:
        """Set the length of slot i to `lengths[i]` tokens. Stored tokens within that length stay. Memory behind them and
        memory of further slots is freed."""
        num_blocks = np.zeros(max(len(self._held), len(lengths)), dtype=np.int64)
        num_blocks[: len(lengths)] = -(-lengths // BLOCK)
        held = np.zeros_like(num_blocks)
        held[: len(self._held)] = self._held
        for slot in np.flatnonzero(held > num_blocks).tolist():
            self._give_back(slot, int(num_blocks[slot]), int(held[slot]))
        self._held = num_blocks

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks that hold tokens."""
        return int(self._held.sum()) * self._block_bytes * self.shape.kv_heads * self.shape.num_layers

    def clear(self) -> None:
        super().clear()
        self._maps, self._held = [], np.zeros(0, dtype=np.int64)

    @property
    def _block_bytes(self) -> int:
        """Bytes of the keys and values of 16 tokens, of one head in one layer."""
        return 2 * self.shape.width * self.shape.dtype.itemsize

    def _pages(self, num_bytes: int) -> mmap.mmap:
        pages = super()._pages(num_bytes)
        pages.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page is longer than most samples
        if len(self._maps) == self.shape.num_layers:
            self._maps = self._maps[1:]  # layers grow in order, so the old one lies in the first map
        self._maps.append(pages)
        return pages

    def _copy(self, old: torch.Tensor, new: torch.Tensor) -> None:
        for slot, count in enumerate(self._held[: len(old)].tolist()):
            held = old[slot, :, :count]
            new[slot, :, : held.shape[1]] = held

    def _give_back(self, slot: int, first: int, end: int) -> None:
        """Free blocks [first, end) of every head of a slot, except pages that also hold blocks of a neighbour."""
        if not self._blocks:
            return
        _, heads, blocks, _, _ = self._blocks[0].shape
        size = self._block_bytes
        # a complete slot is one range of addresses, the end of a slot is one range for each head
        ranges = [(0, heads * blocks)] if not first else [(h * blocks + first, h * blocks + end) for h in range(heads)]
        for start, stop in ranges:
            begin = -(-(slot * heads * blocks + start) * size // _PAGE) * _PAGE
            length = (slot * heads * blocks + stop) * size // _PAGE * _PAGE - begin
            for pages in self._maps if length > 0 else ():
                pages.madvise(mmap.MADV_DONTNEED, begin, length)
