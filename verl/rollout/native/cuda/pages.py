"""A paged store of keys and values on the device: sequences hold pages of one pool, by tables.

    pool     | 0 | 1 | 2 | 3 | 4 | 5 | ...      page 0 is for rows of no sample
    slot 0     3   1                             60 tokens in pages of 32
    slot 1     4                                 17 tokens

The pool is allocated at once and nothing moves, so that graphs hold on to the addresses.
"""

from __future__ import annotations

import numpy as np
import torch

from verl.models.decoder.weights import DenseDecoder
from verl.parallel.device import to_device, write_at
from verl.rollout.native.cuda.store import TokenStore


class PagePool:
    """Keys and values of page 0 and `num_pages` further pages, of `size` tokens each, and the list of free pages."""

    def __init__(self, decoder: DenseDecoder, num_pages: int, size: int):
        self.size = size
        self.store = TokenStore(decoder, num_pages + 1, size)
        self.free = list(range(num_pages, 0, -1))

    def continue_from(self, other: PagePool) -> None:
        """Take over the pages of a smaller pool, under their numbers."""
        held = other.store.num_slots
        self.store.continue_from(other.store, held)
        self.free = [*range(self.store.num_slots - 1, held - 1, -1), *other.free]


class PagedTokenStore(TokenStore):
    """See TokenStore: slots of up to `capacity` tokens, in pages of `pool`. A start is the number of a slot."""

    def __init__(self, pool: PagePool, num_slots: int, capacity: int):
        self.num_slots, self.capacity, self._pool = num_slots, capacity, pool
        self.page_size, self._data = pool.size, pool.store._data
        self._pages = np.zeros((num_slots, capacity // pool.size), dtype=np.int32)
        self._counts = np.zeros(num_slots, dtype=np.int64)
        self._has_moved = False
        self._table = to_device(torch.from_numpy(self._pages), self._data.device).clone()

    def starts(self, slots: np.ndarray) -> np.ndarray:
        return slots

    def where(self, slot: int, start: int, end: int) -> np.ndarray:
        tokens = np.arange(start, end)
        places: np.ndarray = (
            self._pages[slot, tokens // self.page_size].astype(np.int64) * self.page_size + tokens % self.page_size
        )
        return places

    @property
    def pages(self) -> torch.Tensor:
        return self._table

    def take(self, slot: int, length: int) -> torch.Tensor:
        """A copy of the first `length` tokens of a slot, all layers, for `put`."""
        return self._data.index_select(2, self._index(slot, length))

    def put(self, slot: int, taken: torch.Tensor) -> None:
        """See TokenStore; the slot has the pages."""
        write_at(self._data, 2, self._index(slot, taken.shape[2]), taken)

    def move(self, source: int, target: int, length: int) -> None:
        """See TokenStore: the pages change hands."""
        self._give_back(target, 0)
        count, self._has_moved = int(self._counts[source]), True
        self._pages[target, :count], self._counts[target], self._counts[source] = self._pages[source, :count], count, 0

    def continue_from(self, other: TokenStore, num_slots: int) -> None:
        """See TokenStore; the pool has their pages."""
        assert isinstance(other, PagedTokenStore)
        self._pages[:num_slots, : other._pages.shape[1]] = other._pages[:num_slots]
        self._counts[:num_slots] = other._counts[:num_slots]
        self._table.copy_(to_device(torch.from_numpy(self._pages), self._table.device))

    def _index(self, slot: int, length: int) -> torch.Tensor:
        return to_device(torch.from_numpy(self.where(slot, 0, length)), self._data.device)

    def _give_back(self, slot: int, count: int) -> None:
        self._pool.free += self._pages[slot, count : self._counts[slot]].tolist()
        self._counts[slot] = count


def keep(*stores: tuple[PagedTokenStore, np.ndarray]) -> None:
    """Give slot i of each store pages for `lengths[i]` tokens; it keeps its pages up to there. All stores share a pool."""
    num_pages = [-(-lengths // store.page_size) for store, lengths in stores]
    changed = [not np.array_equal(store._counts, counts) for (store, _), counts in zip(stores, num_pages, strict=True)]
    for (store, _), counts in zip(stores, num_pages, strict=True):
        for slot in np.flatnonzero(store._counts > counts).tolist():
            store._give_back(slot, int(counts[slot]))
    for (store, _), counts, is_new in zip(stores, num_pages, changed, strict=True):
        for slot in np.flatnonzero(store._counts < counts).tolist():
            first, end = int(store._counts[slot]), int(counts[slot])
            store._pages[slot, first:end] = [store._pool.free.pop() for _ in range(end - first)]
            store._counts[slot] = end
        if is_new or store._has_moved:
            store._has_moved = False
            store._table.copy_(to_device(torch.from_numpy(store._pages), store._table.device))
