"""Keys and values on the device, and the attention of prompts and of decode rows to them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from verl.models.cpu.weights import DenseDecoder
from verl.models.cuda.varlen import TokenSpans, VarlenKernel
from verl.rollout.cuda.fused import Parts


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
        """The numbers by which the device knows `slots`: of their first tokens."""
        return slots * self.capacity

    def where(self, slot: int, start: int, end: int) -> np.ndarray:
        """int64: the numbers of tokens `start` to `end` of a slot."""
        return slot * self.capacity + np.arange(start, end)

    def next_places(self, starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """int64 [rows]: the numbers of the tokens after the first `lengths` of the slots at `starts`."""
        return starts + lengths

    def tables(self, starts: torch.Tensor) -> torch.Tensor | None:
        """See TokenSpans.pages, of the slots at `starts` (int64)."""
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
        """Take over the first `num_slots` slots of a store whose slots are no larger."""
        ours, theirs = (s._data.unflatten(2, (s.num_slots, s.capacity)) for s in (self, other))
        ours[:, :, :num_slots, : other.capacity] = theirs[:, :, :num_slots]

    def layer(self, layer: int) -> torch.Tensor:
        """All keys and values of a layer, [2, tokens, kv_heads, head_dim]."""
        return self._data[layer]


class PromptAttention:
    """Chunks of prompts, back to back: stored at `where`; each token attends to the tokens before it in its slot (`spans`),
    within the window that `windows` has for the layer."""

    def __init__(
        self,
        store: TokenStore,
        where: torch.Tensor,
        spans: TokenSpans,
        kernel: VarlenKernel,
        scale: float,
        windows: Sequence[int | None],
    ):
        self.store, self.where, self._spans, self._kernel, self._scale = store.layer, where, spans, kernel, scale
        self._windows = windows

    def __call__(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        keys, values = self.store(layer)
        spans = self._spans._replace(window=self._windows[layer])
        out, _ = self._kernel.forward(q, keys, values, spans, True, self._scale)
        return out


class SharedPrompts:
    """The place of each row of a step among the rows of its prompt. The rows of a prompt go through its keys together, as
    `width` places of one sequence of queries. So keys are read once per prompt and not once per sample.

    `gather` int64 [prompts * width] is the row in each place. An empty place repeats a row, and is not read back. `place` is
    int64 [rows]. `spans` has the keys of each prompt, and width * groups queries a prompt.
    """

    def __init__(self, gather: torch.Tensor, place: torch.Tensor, spans: TokenSpans):
        self.gather, self.place, self.spans = gather, place, spans


class DecodeAttention:
    """One new token a row: it is stored at `where`, and attends to its row's tokens and, if prompts are stored apart, to its
    prompt. `windows` has the window of each layer, which hides tokens only where rows have copies of their prompts."""

    def __init__(
        self,
        own: TokenStore,
        where: torch.Tensor,
        spans: TokenSpans,
        prefix: TokenStore,
        shared: SharedPrompts | None,
        kernel: VarlenKernel,
        scale: float,
        parts: Parts,
        windows: Sequence[int | None],
    ):
        self.store, self.where, self._spans = own.layer, where, spans
        self._prefix, self._shared = prefix, shared
        self._kernel, self._scale, self._parts, self._windows = kernel, scale, parts, windows

    def __call__(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        keys, values = self.store(layer)
        window = self._windows[layer]
        spans = self._spans._replace(window=window)
        out, lse = self._kernel.forward(q, keys, values, spans, window is not None, self._scale)
        if self._shared is None:
            return out
        keys, values = self._prefix.layer(layer)
        places, kv_heads = self._shared.gather.shape[0], keys.shape[1]
        grouped = q.unflatten(1, (kv_heads, -1)).transpose(1, 2)  # [rows, groups, kv_heads, head_dim]
        queries = grouped.index_select(0, self._shared.gather).flatten(0, 1)  # contiguous: a view
        part, part_lse = self._kernel.forward(queries, keys, values, self._shared.spans, False, self._scale)
        return self._parts.merged_attention(
            out, lse, part.unflatten(0, (places, -1)), part_lse.unflatten(1, (places, -1)), self._shared.place
        )
