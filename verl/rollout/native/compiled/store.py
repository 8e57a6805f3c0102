"""Keys and values in blocks of 16 tokens, as the compiled attention reads them."""

from __future__ import annotations

import ctypes
import math
import mmap
import resource
from pathlib import Path
from typing import NamedTuple

import torch

from verl.rollout.native.compiled.library import BLOCK, Store
from verl.rollout.native.torch.kv_cache import SlotStore

_MAP_NORESERVE = 0x4000  # Linux; Python names it from 3.13 on


def has_free_addresses() -> bool:
    """Whether addresses cost nothing until they have memory: no limit (ulimit -v) is set, and overcommit is not strict."""
    file = Path("/proc/sys/vm/overcommit_memory")
    is_strict = file.exists() and file.read_text().strip() == "2"
    return not is_strict and resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


class Shape(NamedTuple):
    num_layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of what is stored; int8 has scales in float32

    @property
    def width(self) -> int:
        """Elements of the keys, or of the values, of a block."""
        levels = BLOCK * (-(-self.head_dim // 16) * 16)
        return levels + 4 * BLOCK if self.dtype == torch.int8 else levels


class BlockStore(SlotStore):
    """Per layer [slots, kv_heads, blocks, 2, shape.width]: the keys of a block, then its values (decoder.h).

    Every slot has the addresses of its longest sequence from the start, since memory follows with the first write to a page.
    Growing token by token copies nothing: a copy of gigabytes would stop all rows for seconds. Where addresses are limited,
    capacities double."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self._blocks: list[torch.Tensor] = []
        self._pointers: ctypes.Array[ctypes.c_void_p] | None = None
        self._longest = 0  # tokens of a slot
        self._reserves_limit = has_free_addresses()

    def reserve(self, num_slots: int, length: int, limit: int) -> None:
        """See SlotStore."""
        self._longest = max(self._longest, length)
        super().reserve(num_slots, max(length, limit) if self._reserves_limit else length, limit)

    def view(self) -> Store:
        """The store as the kernels see it, with the room that was reserved."""
        slots, blocks = max(1, self.num_slots), max(1, -(-self.capacity // BLOCK))
        held = self._blocks[0] if self._blocks else None
        if held is None:
            self._blocks = [self._zeros(slots, blocks) for _ in range(self.shape.num_layers)]
        elif len(held) < slots or held.shape[2] < blocks:
            for index, old in enumerate(self._blocks):  # layer by layer, so that at most one layer exists twice
                new = self._zeros(max(slots, len(held)), max(blocks, held.shape[2]))
                self._copy(old, new)
                self._blocks[index] = new
        if self._blocks[0] is not held:
            addresses = [t.data_ptr() for t in self._blocks]
            self._pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        first = self._blocks[0]
        return Store(self._pointers, first.stride(0), first.stride(1))

    def _zeros(self, slots: int, blocks: int) -> torch.Tensor:
        """A layer: what pads a head is multiplied too."""
        size = (slots, self.shape.kv_heads, blocks, 2, self.shape.width)
        return torch.frombuffer(self._pages(math.prod(size) * self.shape.dtype.itemsize), dtype=self.shape.dtype).view(
            size
        )

    def _pages(self, num_bytes: int) -> mmap.mmap:
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)

    def _copy(self, old: torch.Tensor, new: torch.Tensor) -> None:
        count = min(old.shape[2], -(-self._longest // BLOCK))
        new[: len(old), :, :count] = old[:, :, :count]

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        count = -(-length // BLOCK)
        for tensor in self._blocks if count else ():  # nothing is allocated before the first token is stored
            for source, target in zip(sources, targets, strict=True):
                tensor[target, :, :count] = tensor[source, :, :count]

    def take(self, slot: int, length: int, *, copy: bool = False) -> dict[int, list[torch.Tensor]]:
        """See SlotStore: by layer, the blocks that hold the tokens."""
        views = {i: [tensor[slot, :, : -(-length // BLOCK)]] for i, tensor in enumerate(self._blocks)}
        return {i: [t.clone() for t in blocks] for i, blocks in views.items()} if copy else views

    @staticmethod
    def joined(
        first: dict[int, list[torch.Tensor]], num_first: int, then: dict[int, list[torch.Tensor]], num_then: int
    ) -> dict[int, list[torch.Tensor]]:
        """See SlotStore: the later tokens move to other places of their blocks."""
        (start, shift), end = divmod(num_first, BLOCK), -(-(num_first + num_then) // BLOCK)
        layers = {}
        for layer, (held,) in first.items():
            blocks = held.new_zeros(len(held), end, *held.shape[2:])
            blocks[:, : held.shape[1]] = held
            (added,) = then.get(layer, (held[:, :0],))
            for new, old in zip(_by_token(blocks[:, start:]), _by_token(added), strict=True):
                new[:, : old.shape[1], shift:] = old[:, :, : BLOCK - shift]
                new[:, 1:, :shift] = old[:, : new.shape[1] - 1, BLOCK - shift :]
            layers[layer] = [blocks]
        return layers

    def put(self, slot: int, taken: dict[int, list[torch.Tensor]]) -> None:
        self.view()
        for layer, (blocks,) in taken.items():
            self._blocks[layer][slot, :, : blocks.shape[1]] = blocks

    @property
    def num_bytes(self) -> int:
        return sum(t[:, :, : -(-self._longest // BLOCK)].numel() * t.element_size() for t in self._blocks)

    def clear(self) -> None:
        super().clear()
        self._blocks, self._pointers, self._longest = [], None, 0


def _by_token(blocks: torch.Tensor) -> list[torch.Tensor]:
    """Views of keys and values, and of their scales in int8, as [kv_heads, blocks, tokens, ...] (decoder.h)."""
    keys, values = blocks.unbind(2)
    scales, neighbours = [], 2 if blocks.dtype == torch.bfloat16 else 1
    if blocks.dtype == torch.int8:
        scales = [half[..., -4 * BLOCK :].unflatten(2, (BLOCK, 4)) for half in (keys, values)]
        keys, values = keys[..., : -4 * BLOCK], values[..., : -4 * BLOCK]
    return [keys.unflatten(2, (-1, BLOCK, neighbours)).movedim(3, 2), values.unflatten(2, (BLOCK, -1)), *scales]
