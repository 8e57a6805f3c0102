"""Keys and values on the device, and the attention of prompts and of decode rows to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from verl.models.decoder.weights import DenseDecoder
from verl.models.ops.decoding import HeadNorms, SharedPrompts, Slots, attend_new_tokens
from verl.models.ops.pointwise import write_kv
from verl.models.ops.varlen import TokenSpans, VarlenKernel


class TokenStore:
    """Keys and values of `num_slots` sequences of up to `capacity` tokens, for all layers, allocated at once and never
    moved: graphs hold on to the addresses. Token t of slot s is number s * capacity + t."""

    page_size = 0  # without pages

    def __init__(self, decoder: DenseDecoder, num_slots: int, capacity: int):
        self.num_slots, self.capacity = num_slots, capacity
        shape = (len(decoder.layers), 2, num_slots * capacity, decoder.num_kv_heads, decoder.head_dim)
        self._data = torch.zeros(shape, dtype=decoder.embed.dtype, device=decoder.embed.device)

    @staticmethod
    def bytes_per_token(decoder: DenseDecoder) -> int:
        return 2 * len(decoder.layers) * decoder.num_kv_heads * decoder.head_dim * decoder.embed.element_size()

    @property
    def num_bytes(self) -> int:
        return self._data.numel() * self._data.element_size()

    def starts(self, slots: np.ndarray) -> np.ndarray:
        """int64: the number of the first token of each of `slots`."""
        return slots * self.capacity

    def where(self, slot: int, start: int, end: int) -> np.ndarray:
        """int64: the numbers of tokens `start` to `end` of a slot."""
        return slot * self.capacity + np.arange(start, end)

    @property
    def pages(self) -> torch.Tensor | None:
        """int32 [slots, most pages]: the pages of each slot; None without pages."""
        return None

    def take(self, slot: int, length: int) -> torch.Tensor:
        """A view of the first `length` tokens of a slot, all layers, for `put`."""
        return self._data[:, :, slot * self.capacity : slot * self.capacity + length]

    def put(self, slot: int, taken: torch.Tensor) -> None:
        """Write what `take` gave to the start of a slot."""
        self.take(slot, taken.shape[2]).copy_(taken)

    def move(self, source: int, target: int, length: int) -> None:
        """Move the first `length` tokens of slot `source` to slot `target`."""
        self.put(target, self.take(source, length))

    def continue_from(self, other: TokenStore, num_slots: int) -> None:
        """Copy the first `num_slots` slots of `other`, a store with the same or a smaller capacity."""
        new, old = (s._data.unflatten(2, (s.num_slots, s.capacity)) for s in (self, other))
        new[:, :, :num_slots, : other.capacity] = old[:, :, :num_slots]

    def layer(self, layer: int) -> torch.Tensor:
        """All keys and values of a layer, [2, tokens, kv_heads, head_dim]."""
        return self._data[layer]


@dataclass(eq=False)
class PromptAttention:
    """Chunks of prompts, back to back: stored at `where`; each token attends to the tokens before it in its slot (`spans`),
    within the window that `windows` has for the layer."""

    store: TokenStore
    where: torch.Tensor
    spans: TokenSpans
    kernel: VarlenKernel
    scale: float
    windows: Sequence[int | None]

    def __call__(
        self, layer: int, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norms: HeadNorms
    ) -> torch.Tensor:
        store = self.store.layer(layer)
        q = write_kv(qkv, cos, sin, *norms, store, self.where)
        out, _ = self.kernel.forward(q, *store, self.spans._replace(window=self.windows[layer]), True, self.scale)
        return out


@dataclass(eq=False)
class DecodeAttention:
    """Attention of one new token a row. The token is stored behind its row's tokens (`slots`). It attends to them and, with
    `shared`, to its prompt in `prefix`. `windows` has the sliding window of each layer, for rows with a copy of the prompt."""

    row_store: TokenStore
    slots: Slots
    prefix: TokenStore
    shared: SharedPrompts | None
    scale: float
    windows: Sequence[int | None]

    def __call__(
        self, layer: int, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norms: HeadNorms
    ) -> torch.Tensor:
        window, store = self.windows[layer], self.row_store.layer(layer)
        prompts = self.prefix.layer(layer)
        return attend_new_tokens(qkv, cos, sin, norms, store, self.slots, window, self.scale, prompts, self.shared)
