"""Adapters as the compiled decoder takes them: packed matrices, and the runs of tokens that have them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from verl.models.adapter_weights import LowRank
from verl.rollout.cpu.library import Kernels, PackedLowRank
from verl.rollout.native.adapters import ArrangedAdapters, TokenAdapters


class PackedAdapter:
    """A copy of an adapter for the products of all layers and the head, see `struct low_rank`."""

    def __init__(self, kernels: Kernels, joined: Sequence[LowRank | None]):
        self.rank = max((len(pair.down) for pair in joined if pair is not None), default=0)
        self._held: list[torch.Tensor] = []
        self.products = (PackedLowRank * len(joined))()
        for number, pair in enumerate(joined):
            if pair is not None:
                is_gate_up = number % 4 == 2  # of a layer; the head has the number 4 * layers
                up = kernels.pack_halves(pair.up) if is_gate_up else kernels.pack(pair.up)
                down = kernels.pack(pair.down)
                self._held += [down, up]
                self.products[number] = PackedLowRank(down.data_ptr(), up.data_ptr(), len(pair.down))


class AdapterRuns:
    """The runs of a forward's tokens, and of those that `keep` holds, with their adapters from layer `first` on."""

    def __init__(
        self, tokens: TokenAdapters | None, packed: ArrangedAdapters[PackedAdapter], keep: np.ndarray, first: int = 0
    ):
        ends, adapters = (np.zeros(0, np.int64), []) if tokens is None else tokens.runs()
        self.ends, self.kept_ends = ends, np.searchsorted(keep, ends).astype(np.int64)
        self._packed = [None if adapter is None else packed.of(adapter) for adapter in adapters]
        self.max_rank = max((p.rank for p in self._packed if p is not None), default=0)
        skipped = 4 * first * ctypes.sizeof(PackedLowRank)
        addresses = [None if p is None else ctypes.addressof(p.products) + skipped for p in self._packed]
        self.pointers = (ctypes.c_void_p * len(addresses))(*addresses)
