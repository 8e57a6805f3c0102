"""Storage of keys and values: slots of equal capacity, per layer, allocated when a layer first writes."""

from __future__ import annotations

import torch

_ROUND = 16  # capacities are multiples of this, so that every slot starts on a cache line


class SlotStore:
    """Keys and values as [slots, kv_heads, capacity, head_dim] per layer.

    `reserve` says what is needed; a layer's tensors follow at its next `tensors`. They are zeroed when allocated, because
    attention multiplies masked values by 0, and 0 times the NaN of stale memory is not 0.
    """

    def __init__(self) -> None:
        self.num_slots = 0
        self.capacity = 0
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def reserve(self, num_slots: int, length: int, limit: int) -> None:
        """Make room for `length` tokens in each of `num_slots` slots; contents stay. Capacities double, up to `limit`
        tokens, so that growing token by token copies little."""
        if num_slots > self.num_slots:
            self.num_slots = num_slots
        if length > self.capacity:
            self.capacity = _rounded(max(length, min(2 * self.capacity, limit)))

    def tensors(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer; `k` and `v` [1, kv_heads, tokens, head_dim] give heads, widths, dtype and device."""
        held = self._layers.get(layer)
        if held is not None and held[0].dtype == k.dtype and held[0].device == k.device:
            if held[0].shape[0] >= self.num_slots and held[0].shape[2] >= self.capacity:
                return held
        else:
            held = None
        grown = tuple(t.new_zeros(self.num_slots, t.shape[1], self.capacity, t.shape[3]) for t in (k, v))
        if held is not None:
            for new, old in zip(grown, held, strict=True):
                new[: old.shape[0], :, : old.shape[2]] = old
        self._layers[layer] = (grown[0], grown[1])
        return self._layers[layer]

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy the first `length` tokens of slots `sources` to slots `targets` (none is in both)."""
        for pair in self._layers.values():
            for tensor in pair:
                for source, target in zip(sources, targets, strict=True):
                    tensor[target, :, :length] = tensor[source, :, :length]

    def copy_from(self, other: SlotStore, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a slot of `other` to slot `target` of this store."""
        for layer, pair in other._layers.items():
            for new, old in zip(self.tensors(layer, *pair), pair, strict=True):
                new[target, :, :length] = old[source, :, :length]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for pair in self._layers.values() for t in pair)

    def clear(self) -> None:
        """Free the memory."""
        self._layers.clear()
        self.num_slots = self.capacity = 0


def _rounded(length: int) -> int:
    return -(-length // _ROUND) * _ROUND
