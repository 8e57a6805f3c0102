"""Storage of keys and values: slots of equal capacity, per layer, allocated when a layer first writes."""

from typing import Any, TypeVar

import numpy as np
import torch

from verl.models.delta_net import States

_ROUND = 16  # capacities are multiples of this, so that every slot starts on a cache line


class SlotStore:
    """Values as [slots, kv_heads, capacity, head_dim] per layer, and keys likewise or, with `keys_as_columns`, as
    [slots, kv_heads, head_dim, capacity].

    With keys as columns, the scores of a few queries are a matmul of two row-major matrices. That is a fifth faster, and reads
    each line of memory once.

    `reserve` sets the size; a layer's tensors follow at its next `tensors`. They are zeroed when allocated, because
    attention multiplies masked values by 0, and 0 times the NaN of stale memory is not 0.
    """

    def __init__(self, *, keys_as_columns: bool = False) -> None:
        self.keys_as_columns = keys_as_columns
        self.num_slots = 0
        self.capacity = 0
        self.version = 0  # counts up when tensors that were returned may no longer be the layers' own
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._states: dict[int, States] = {}

    def reserve(self, num_slots: int, length: int, limit: int) -> None:
        """Make room for `length` tokens in each of `num_slots` slots; contents stay. Capacities double, up to `limit`
        tokens, so that growing token by token copies little."""
        if num_slots > self.num_slots:
            self.num_slots = num_slots
            self.version += 1
        if length > self.capacity:
            self.version += 1
            self.capacity = rounded(max(length, min(2 * self.capacity, limit)))

    def tensors(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer; `k` and `v` [tokens, kv_heads, head_dim] give heads, widths, dtype and device."""
        held = self._layers.get(layer)
        if held is not None and held[0].dtype == k.dtype and held[0].device == k.device:
            if held[1].shape[0] >= self.num_slots and held[1].shape[2] >= self.capacity:
                return held
        else:
            held = None
        keys = k.new_zeros(self._key_shape(k.shape[1], k.shape[2]))
        values = v.new_zeros(self.num_slots, v.shape[1], self.capacity, v.shape[2])
        if held is not None:
            slots, length = held[1].shape[0], held[1].shape[2]
            for new, old in zip(self._by_token((keys, values)), self._by_token(held), strict=True):
                new[:slots, :, :length] = old
        self._layers[layer] = (keys, values)
        return keys, values

    @property
    def has_states(self) -> bool:
        """Whether layers have states in place of keys and values."""
        return bool(self._states)

    def states(self, layer: int, first: States) -> States:
        """The states [slots, ...] of a layer with linear attention; `first` is the state of one row without tokens."""
        held = self._states.get(layer, ())
        if any(old.dtype != new.dtype or old.device != new.device for old, new in zip(held, first, strict=False)):
            held = ()
        if not held or len(held[0]) < self.num_slots:
            grown = [state.new_zeros(self.num_slots, *state.shape[1:]) for state in first]
            for new, old in zip(grown, held, strict=False):
                new[: len(old)] = old
            self._states[layer] = held = grown
        return held

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy the first `length` tokens of slots `sources` to slots `targets` (none is in both), and their states."""
        for state in (state for states in self._states.values() for state in states):
            for source, target in zip(sources, targets, strict=True):
                if source < len(state):  # else nothing of the slot has been computed
                    state[target] = state[source]
        for pair in self._layers.values():
            for tensor in self._by_token(pair):
                for source, target in zip(sources, targets, strict=True):
                    tensor[target, :, :length] = tensor[source, :, :length]

    def take(self, slot: int, length: int, *, copy: bool = False) -> dict[int, list[torch.Tensor]]:
        """Keys and values of the first `length` tokens of a slot, for `put`: by layer, [kv_heads, length, head_dim] each. They
        are views, or copies with `copy`. States behind all tokens of the slot have -1 - layer as their key."""
        views = {i: [t[slot, :, :length] for t in self._by_token(pair)] for i, pair in self._layers.items()}
        views |= {~i: [t[slot] for t in states] for i, states in self._states.items()}
        return {i: [t.clone() for t in pair] for i, pair in views.items()} if copy else views

    @staticmethod
    def joined(
        first: dict[int, list[torch.Tensor]], num_first: int, then: dict[int, list[torch.Tensor]], num_then: int
    ) -> dict[int, list[torch.Tensor]]:
        """A copy of keys and values of `num_first` tokens and `num_then` tokens behind them, for `put`; both as `take` gives
        them. A store without a token may have no layers yet. States are of the last token."""
        none = {i: [t[:, :0] if i >= 0 else t for t in held] for i, held in first.items()}
        pairs = {i: zip(held, {**none, **then}[i], strict=True) for i, held in first.items()}
        return {i: [torch.cat(p, dim=1) if i >= 0 else p[1].clone() for p in layer] for i, layer in pairs.items()}

    def put(self, slot: int, taken: dict[int, list[torch.Tensor]]) -> None:
        """Write what `take` of a store with the same layers gave to the start of a slot."""
        for layer, pair in taken.items():
            if layer < 0:
                for state, new in zip(self.states(~layer, [t[None] for t in pair]), pair, strict=True):
                    state[slot] = new
                continue
            stored = self._by_token(self.tensors(layer, *(t.transpose(0, 1) for t in pair)))
            for new, old in zip(stored, pair, strict=True):
                new[slot, :, : old.shape[1]] = old

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for held in (*self._layers.values(), *self._states.values()) for t in held)

    def clear(self) -> None:
        """Free the memory."""
        self._layers.clear()
        self._states.clear()
        self.num_slots = self.capacity = 0
        self.version += 1

    def _key_shape(self, kv_heads: int, head_dim: int) -> tuple[int, ...]:
        inner = (head_dim, self.capacity) if self.keys_as_columns else (self.capacity, head_dim)
        return (self.num_slots, kv_heads, *inner)

    def _by_token(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of both as [slots, kv_heads, tokens, head_dim]."""
        keys, values = pair
        return (keys.transpose(2, 3) if self.keys_as_columns else keys), values


_Lengths = TypeVar("_Lengths", int, "np.ndarray[Any, Any]")


def rounded(length: _Lengths) -> _Lengths:
    """The least capacity that holds `length` tokens."""
    return -(-length // _ROUND) * _ROUND
