"""The device's side of generation: stores, the columns of the running rows, and a decode step without the host.

A decode step reads the rows' newest tokens from the columns and leaves the next ones there, so that the next step can be
launched before the host has seen them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from verl.data_proto.samples import SamplingParams
from verl.models.hf_module import HFModule
from verl.models.ops.decoding import MOST_SPANS, SPAN, SharedPrompts, Slots
from verl.models.ops.table import op
from verl.models.ops.varlen import TokenSpans, VarlenKernel
from verl.models.vision import placed_positions
from verl.parallel.device import to_device, write_at
from verl.rollout.layout import Chunk
from verl.rollout.native.batch import Group, features_of, place_images
from verl.rollout.native.cuda.forward import StraightForward
from verl.rollout.native.cuda.graphs import StepGraphs
from verl.rollout.native.cuda.pages import PagedTokenStore, PagePool, keep
from verl.rollout.native.cuda.store import DecodeAttention, PromptAttention, TokenStore
from verl.rollout.sampling import sample
from verl.rollout.uniforms import uniforms_at

# columns of a row, int64
TOKEN, POSITION, OWN_START, OWN_LENGTH, KEY, DRAWN = range(6)
NUM_COLUMNS = 6


class DeviceSizes(NamedTuple):
    """Sizes of the stores. `width` is the maximum of rows that read a prompt together; 0 if each row has a copy of its prompt.
    With a `page_size` both stores share `num_pages`."""

    num_rows: int
    own_capacity: int
    num_prefixes: int
    prefix_capacity: int
    width: int
    longest: int  # positions
    page_size: int = 0
    num_pages: int = 0

    def num_tokens(self) -> int:
        return (self.num_rows + 1) * self.own_capacity + self.num_prefixes * self.prefix_capacity


class StepBounds(NamedTuple):
    """Maxima of a generation: tokens in a slot of the row store, tokens in a slot of the prefix store, prompts."""

    own_tokens: int
    prefix_tokens: int
    num_prefixes: int


class Readback:
    """See Sampled: `count` tokens and log-probs on their way to the host, `packed` int32 [2, count or more]."""

    def __init__(self, packed: torch.Tensor, count: int):
        self._count = count
        if packed.device.type != "cuda":
            self._host, self._event = packed.clone(), None
            return
        self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        self._host.copy_(packed, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> tuple[np.ndarray, np.ndarray]:
        if self._event is not None:
            self._event.synchronize()
        tokens, bits = self._host.numpy()
        return tokens[: self._count], bits[: self._count].view(np.float32)


class DeviceRows:
    """Everything that lives on the device during one generation, or for several of the same sizes."""

    def __init__(
        self,
        forward: StraightForward,
        sizes: DeviceSizes,
        params: SamplingParams,
        kernel: VarlenKernel,
        graphs: StepGraphs,
    ):
        self.forward, self.sizes, self.params, self.kernel, self.graphs = forward, sizes, params, kernel, graphs
        decoder = forward.decoder
        self.device = decoder.embed.device
        # the last slot of `row_store` is for rows of no sample
        slots = (sizes.num_rows + 1, sizes.own_capacity), (sizes.num_prefixes, sizes.prefix_capacity)
        self.pool = PagePool(decoder, sizes.num_pages, sizes.page_size) if sizes.page_size else None
        if self.pool is None:
            self.row_store, self.prefix = (TokenStore(decoder, *shape) for shape in slots)
        else:
            self.row_store, self.prefix = (PagedTokenStore(self.pool, *shape) for shape in slots)
        self.bounds = StepBounds(sizes.own_capacity, sizes.prefix_capacity, sizes.num_prefixes)
        self._make_columns()

    def _make_columns(self) -> None:
        rows, places = self.sizes.num_rows, self.sizes.num_prefixes * self.sizes.width

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self.columns = zeros(NUM_COLUMNS, rows)
        self._out = zeros(2 * rows, dtype=torch.int32)
        self._place, self._gather = zeros(rows), zeros(places)
        self._prefix_start, self._prefix_used = zeros(self.sizes.num_prefixes), zeros(self.sizes.num_prefixes)
        grows, limit = (POSITION, OWN_LENGTH, DRAWN), torch.full((NUM_COLUMNS, 1), torch.iinfo(torch.int64).max)
        step = torch.tensor([[int(column in grows)] for column in range(NUM_COLUMNS)])
        # a row that has ended runs on until its place is taken; it must stay within its slot
        limit[POSITION], limit[OWN_LENGTH] = self.sizes.longest - 1, self.sizes.own_capacity - 1
        self._step, self._limit = step.to(self.device), limit.to(self.device)

    def continue_from(self, other: DeviceRows, slots: np.ndarray) -> None:
        """Take over the rows, keys and values of smaller stores; row r has `slots[r]` of the row store."""
        if self.pool is not None and other.pool is not None:
            self.pool.continue_from(other.pool)
        self.row_store.continue_from(other.row_store, other.sizes.num_rows)
        self.prefix.continue_from(other.prefix, other.sizes.num_prefixes)
        self.columns[:, : other.sizes.num_rows] = other.columns
        self.columns[OWN_START, : len(slots)] = to_device(torch.from_numpy(self.row_store.starts(slots)), self.device)

    @property
    def num_bytes(self) -> int:
        return self.row_store.num_bytes + self.prefix.num_bytes if self.pool is None else self.pool.store.num_bytes

    def keep(self, own_lengths: np.ndarray, prefix_lengths: np.ndarray) -> None:
        """Give each slot pages for its length in tokens (int64 [slots] of each store), and take back its further pages."""
        assert isinstance(self.row_store, PagedTokenStore)
        assert isinstance(self.prefix, PagedTokenStore)
        keep((self.row_store, own_lengths), (self.prefix, prefix_lengths))

    def prefill(self, module: HFModule, chunks: list[tuple[Group, Chunk]]) -> torch.Tensor:
        """Compute chunks of prompts and store them in their prefix slots; `module` computes their images. Returns the logits
        after each that completes its prompt, float32 [prompts, vocab]."""
        ids = np.concatenate([np.array(g.request.token_ids[c.start : c.end], dtype=np.int64) for g, c in chunks])
        media, shifts = place_images(module, chunks, 0, self.device)
        places = np.concatenate([np.arange(c.start, c.end) + s for s, (_, c) in zip(shifts, chunks, strict=True)])
        lengths = np.array([c.end - c.start for _, c in chunks])
        starts = self.prefix.starts(np.array([c.slot for _, c in chunks]))
        where = np.concatenate([self.prefix.where(c.slot, c.start, c.end) for _, c in chunks])
        tokens, positions, where = to_device(torch.from_numpy(np.stack([ids, places, where])), self.device)
        pages = self.prefix.pages
        spans = TokenSpans(
            self._int32(np.cumsum([0, *lengths])),
            self._int32(np.append(starts, 0)),
            int(lengths.max()),
            self.bounds.prefix_tokens,
            self._int32(np.array([c.end for _, c in chunks])),
            None if pages is None else pages[to_device(torch.from_numpy(starts), self.device)],
            self.sizes.page_size,
        )
        scale, windows = self.forward.decoder.scale, self.forward.windows
        attend = PromptAttention(self.prefix, where, spans, self.kernel, scale, windows)
        completed = [i for i, (g, c) in enumerate(chunks) if c.end == g.num_tokens]
        last = to_device(torch.from_numpy(np.cumsum(lengths)[completed] - 1), self.device)
        positions = placed_positions(module, tokens[None], positions[None], media).squeeze(-2)
        images = features_of(module, tokens, media)
        return self.forward.logits(self.forward.hidden(tokens, positions, attend, images)[last])

    def _int32(self, values: np.ndarray) -> torch.Tensor:
        return to_device(torch.from_numpy(values.astype(np.int32)), self.device)

    def begin(self, rows: np.ndarray, columns: np.ndarray, logits: torch.Tensor) -> Readback:
        """Sample the first tokens of samples from `logits` [samples, vocab] and put the samples in `rows`. `columns`
        int64 [6, samples] as they will be at the first decode step, but for the tokens."""
        index = to_device(torch.from_numpy(rows), self.device)
        new = to_device(torch.from_numpy(columns), self.device)
        tokens, log_probs = sample(logits, self.params, uniforms_at(new[KEY], new[DRAWN] - 1))
        new[TOKEN] = tokens
        write_at(self.columns, 1, index, new)
        packed = torch.empty(2, len(rows), dtype=torch.int32, device=self.device)
        _pack(packed, tokens, log_probs)
        return Readback(packed, len(rows))

    def move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy the columns of rows `sources` to rows `targets`. Stored keys and values do not move."""
        from_rows, to_rows = to_device(torch.from_numpy(np.stack([sources, targets])), self.device)
        write_at(self.columns, 1, to_rows, self.columns[:, from_rows])

    def retire(self, rows: np.ndarray) -> None:
        """Mark `rows` as rows of no sample. Their further results go to the spare slot, since new samples may take their
        slots."""
        if len(rows):
            index = to_device(torch.from_numpy(rows), self.device)
            self.columns[OWN_START].index_fill_(0, index, int(self.row_store.starts(np.array(self.sizes.num_rows))))
            self.columns[OWN_LENGTH].index_fill_(0, index, 0)

    def share(self, slots: np.ndarray, lengths: np.ndarray, members: np.ndarray) -> int:
        """Assign row r to prompt `members[r]`, or to none for -1. Prompt i is in slot `slots[i]` of the prefix store and has
        `lengths[i]` tokens. Returns the number of prompts that a step computes."""
        num_prompts = min(next_power(len(slots)), self.bounds.num_prefixes)
        gather, place = assign_places(members, self.sizes.width, num_prompts)
        start, used = np.zeros((2, num_prompts), dtype=np.int64)
        start[: len(slots)] = self.prefix.starts(slots)
        used[: len(slots)] = lengths
        used[len(slots) :] = 1  # an empty softmax is not defined
        for buffer, values in (
            (self._gather, gather), (self._place, place), (self._prefix_start, start), (self._prefix_used, used),
        ):  # fmt: skip
            buffer[: len(values)].copy_(to_device(torch.from_numpy(values), self.device))
        return num_prompts

    def launch(self, num_rows: int, num_prompts: int, count: int, longest: int) -> Readback:
        """One decode step of the first `num_rows` rows; the next tokens go to the columns. Returns `count` of them. No row has
        more than `longest` tokens in its slot."""
        own_tokens, prefix_tokens, _ = self.bounds
        longest = min(next_power(max(longest, SPAN)), own_tokens)
        if longest > SPAN * MOST_SPANS:  # no kernel has more programs for longer rows
            longest = own_tokens
        key = (num_rows, num_prompts, own_tokens, prefix_tokens, longest)
        self.graphs.run(key, lambda: self._advance(num_rows, self._forward(num_rows, num_prompts, longest)))
        return Readback(self._out[: 2 * num_rows].view(2, num_rows), count)

    def _forward(self, num_rows: int, num_prompts: int, longest: int) -> torch.Tensor:
        columns, decoder, max_tokens = self.columns[:, :num_rows], self.forward.decoder, self.bounds.own_tokens
        pages = self.row_store.pages, self.sizes.page_size
        slots = Slots(columns[OWN_START], columns[OWN_LENGTH], max_tokens, *pages, longest)
        shared = self._shared(num_rows, num_prompts)
        attend = DecodeAttention(self.row_store, slots, self.prefix, shared, decoder.scale, self.forward.windows)
        return self.forward.logits(self.forward.hidden(columns[TOKEN], columns[POSITION], attend))

    def _shared(self, num_rows: int, num_prompts: int) -> SharedPrompts | None:
        if not self.sizes.width:
            return None
        starts, used = self._prefix_start[:num_prompts], self._prefix_used[:num_prompts]
        slots = Slots(starts, used, self.bounds.prefix_tokens, self.prefix.pages, self.sizes.page_size)
        return SharedPrompts(slots, self._gather[: num_prompts * self.sizes.width], self._place[:num_rows])

    def _advance(self, num_rows: int, logits: torch.Tensor) -> None:
        columns, out = self.columns[:, :num_rows], self._out[: 2 * num_rows].view(2, num_rows)
        tokens, log_probs = sample(logits, self.params, uniforms_at(columns[KEY], columns[DRAWN]))
        advance(tokens, log_probs, columns, self._step, self._limit, out)


@op(triton="draws:launch_advance", writes=("columns", "out"))
def advance(
    tokens: torch.Tensor,
    log_probs: torch.Tensor,
    columns: torch.Tensor,
    step: torch.Tensor,
    limit: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write the sampled tokens and their log-probs to `out` as `_pack` does, and the columns of the next step."""
    _pack(out, tokens, log_probs)
    columns[TOKEN] = tokens
    torch.minimum(columns.add_(step), limit, out=columns)


def _pack(packed: torch.Tensor, tokens: torch.Tensor, log_probs: torch.Tensor) -> None:
    """Write both to `packed`, int32 [2, rows]: one copy to the host instead of two."""
    packed[0].copy_(tokens)
    packed[1].view(torch.float32).copy_(log_probs)


def next_power(number: int) -> int:
    """The least power of two that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()


def step_rows(number: int) -> int:
    """Rows of a step with `number` running ones: a power of two up to 64, above it a multiple of 16.

    The graphs of each size stay, so that many sizes cost little."""
    return next_power(number) if number <= 64 else -(-number // 16) * 16


def assign_places(members: np.ndarray, width: int, num_prompts: int) -> tuple[np.ndarray, np.ndarray]:
    """Places for rows: row r goes to one of the `width` places of prompt `members[r]`. Returns two int64 arrays: the row in
    each place [num_prompts * width], 0 for an empty place; the place of each row [rows], 0 for a row of no prompt."""
    used = np.flatnonzero(members >= 0)
    prompts = members[used]
    order = np.argsort(prompts, kind="stable")
    counts = np.bincount(prompts, minlength=num_prompts)
    rank = np.arange(len(used)) - np.repeat(np.cumsum(counts) - counts, counts)
    place = np.zeros(len(members), dtype=np.int64)
    place[used[order]] = prompts[order] * width + rank
    gather = np.zeros(num_prompts * width, dtype=np.int64)
    gather[place[used]] = used
    return gather, place
