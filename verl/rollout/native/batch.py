"""The waiting and running samples of a generation: bookkeeping on the host, for the scheduler and its backends.

    waiting ──take_chunks──► prefilling ──(last chunk)──► ready ──start──► rows of the batch

A group is a prompt with its samples, or one sample that continues. A group holds a slot of the
backend's prefix store from its first chunk until nothing reads the slot any more. A row holds a slot of the backend's own
store. Slots and rows are kept dense, so that attention runs over plain slices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from verl.data_proto.samples import PromptRequest
from verl.models.hf_module import HFModule
from verl.models.vision import ImageFeatures, PlacedMedia, image_features, positions_within
from verl.rollout.layout import Chunk


class SavedTokens(NamedTuple):
    """Keys and values of the first tokens of a sample, see Backend.save, and the step of their generation."""

    values: Any = None
    num_tokens: int = 0
    step: int = 0


NOTHING_SAVED = SavedTokens()


@dataclass(eq=False)
class Group:
    """A prompt and its progress."""

    request: PromptRequest
    pending: deque[int]  # samples that have yet to start, counted from 0
    num_live: int  # samples that have not ended
    saved: SavedTokens = NOTHING_SAVED  # of a sample that continues, until it starts
    slot: int = -1  # of the prefix store
    num_computed: int = 0  # tokens with stored keys and values
    drawn: tuple[np.ndarray, np.ndarray] | None = (
        None  # tokens and log-probs of a sample that was preempted; its prompt's end
    )
    logits: torch.Tensor | None = field(
        default=None, repr=False
    )  # [vocab], after the last token, while samples are pending
    experts: list[np.ndarray] = field(default_factory=list, repr=False)  # of its tokens, see ExpertRecords
    slots: list[np.ndarray] = field(default_factory=list, repr=False)  # of its tokens, see SlotRecords
    states: torch.Tensor | None = field(default=None, repr=False)  # of its newest computed tokens, see DraftHead
    shift: int = 0  # of positions behind its images, against the count of tokens
    twins: list[Group] = field(default_factory=list, repr=False)  # with the same prompt, which wait for its end

    @property
    def num_tokens(self) -> int:
        return len(self.request.token_ids)

    @property
    def prompt(self) -> tuple[object, ...] | None:
        """The key of a prompt that is computed once for groups of equal keys; None if it is computed by itself."""
        request = self.request
        if request.num_drawn or request.placed or self.saved.num_tokens or self.drawn is not None:
            return None
        return request.adapter, request.token_ids

    def __post_init__(self) -> None:
        self.num_computed = self.saved.num_tokens


class Prompts:
    """Queues of prompts. Samples that continue come first, because they are the longest. Prompts with long responses in an
    earlier epoch follow, so that few rows run at the end. Prompts without such a length come by their own length, longest
    first: neighbours then have similar lengths."""

    def __init__(self) -> None:
        self.waiting: deque[Group] = deque()
        self.prefilling: deque[Group] = deque()
        self.ready: deque[Group] = deque()
        self.by_slot: list[Group] = []  # groups that hold a prefix slot

    @property
    def is_empty(self) -> bool:
        """Whether no sample has yet to start."""
        return not (self.waiting or self.prefilling or self.ready)

    def groups(self) -> list[Group]:
        """The groups with samples that have yet to start."""
        twins = [twin for group in self.prefilling for twin in group.twins]
        return [*self.waiting, *twins, *self.prefilling, *self.ready]

    def sort(self) -> None:
        """Sort the waiting groups, after additions."""
        order = [(g.request.num_drawn == 0, -g.request.expected_tokens, -g.num_tokens) for g in self.waiting]
        self.waiting = deque(self.waiting[i] for i in sorted(range(len(order)), key=order.__getitem__))

    def take_chunks(
        self,
        num_free_rows: int,
        budget: int,
        admits: Callable[[Group], bool] = lambda group: True,
        ahead: int = 0,
        joins: bool = False,
    ) -> list[tuple[Group, Chunk]]:
        """Prompt tokens to compute next: at most `budget` tokens, of prompts with samples that fit the free rows, and `ahead`
        more as soon as half of these have started. A prompt with images is one chunk. As the first chunk it may exceed the
        budget. If it `joins`, a group whose prompt is being computed waits for it."""
        begun = sum(len(g.pending) for g in (*self.ready, *self.prefilling))
        begun += sum(len(twin.pending) for g in self.prefilling for twin in g.twins)
        limit = num_free_rows + ahead if begun < num_free_rows + (ahead + 1) // 2 else 0
        computing = {g.prompt: g for g in self.prefilling if g.prompt is not None} if joins else {}
        while self.waiting and begun < limit and admits(self.waiting[0]):
            group = self.waiting.popleft()
            begun += len(group.pending)
            if joins and (prompt := group.prompt) is not None:
                if computing.setdefault(prompt, group) is not group:
                    computing[prompt].twins.append(group)
                    continue
            self._hold(group)
            self.prefilling.append(group)
        chunks: list[tuple[Group, Chunk]] = []
        while self.prefilling and budget > 0:
            group = self.prefilling[0]
            end = min(group.num_tokens, group.num_computed + budget)
            if group.request.placed:  # images are computed at once
                end = group.num_tokens
            if chunks and end - group.num_computed > budget:
                break
            chunks.append((group, Chunk(group.slot, group.num_computed, end)))
            budget -= end - group.num_computed
            group.num_computed = end
            if end == group.num_tokens:
                self.ready.append(self.prefilling.popleft())
        return chunks

    def join(self, group: Group) -> list[Group]:
        """The groups that have waited for the prompt of `group`, which are ready now, each with a slot."""
        twins, group.twins = group.twins, []
        for twin in twins:
            twin.num_computed, twin.logits = group.num_computed, group.logits
            self._hold(twin)
            self.ready.append(twin)
        return twins

    def _hold(self, group: Group) -> None:
        """Give a group a prefix slot."""
        group.slot = len(self.by_slot)
        self.by_slot.append(group)

    def start(self, num_free_rows: int) -> list[tuple[Group, int]]:
        """(group, sample) of the samples that start now, at most `num_free_rows`."""
        started: list[tuple[Group, int]] = []
        while self.ready and len(started) < num_free_rows:
            group = self.ready[0]
            started.append((group, group.pending.popleft()))
            if not group.pending:
                self.ready.popleft()
        return started

    def drop(self, group: Group) -> None:
        """Take a group out of the queues. Those that wait for its prompt wait for a slot again."""
        for queue in (self.waiting, self.prefilling, self.ready, *(g.twins for g in self.prefilling)):
            if group in queue:
                queue.remove(group)
        self.waiting.extendleft(reversed(group.twins))
        group.twins = []

    def leave_slot(self, group: Group) -> Group | None:
        """Give back the group's prefix slot. Returns the group that takes it over, if one must move to keep slots dense;
        its tokens are still in the last slot."""
        last = self.by_slot.pop()
        slot, group.slot = group.slot, -1
        if last is group:
            return None
        self.by_slot[slot] = last
        last.slot = slot
        return last


class StepInputs(NamedTuple):
    """The tokens that a step computes of running rows: the newest of each row, then its drafts; each an int64 [tokens]."""

    rows: np.ndarray  # ascending
    ahead: np.ndarray  # 0 for the newest token of a row, 1 for its first draft
    ids: np.ndarray

    @classmethod
    def of(cls, rows: np.ndarray, ids: np.ndarray | None = None) -> StepInputs:
        """A token of each of `rows`, without drafts."""
        return cls(rows, np.zeros_like(rows), np.zeros_like(rows) if ids is None else ids)


class BatchRows:
    """The running samples as columns; row r owns slot r of the row store. Rows below `end` are running, but for `holes`."""

    def __init__(self, max_new_tokens: int):
        self.num_rows = self.end = 0
        self.holes: list[int] = []
        self.groups: list[Group | None] = []
        self.sample = np.zeros(0, dtype=np.int64)
        self.key = np.zeros(0, dtype=np.int64)  # of its random numbers
        self.prompt_length = np.zeros(0, dtype=np.int64)
        self.own_start = np.zeros(0, dtype=np.int64)  # prompt tokens in the row store
        self.length = np.zeros(0, dtype=np.int64)  # tokens sampled by this request
        self.num_drawn = np.zeros(0, dtype=np.int64)  # response tokens before this request
        self.limit = np.zeros(0, dtype=np.int64)  # most tokens of this request
        self.max_new_tokens = max_new_tokens
        self.tokens = np.zeros((0, max_new_tokens), dtype=np.int64)
        self.log_probs = np.zeros((0, max_new_tokens))
        self._drafts: dict[int, list[int]] = {}  # by row, of the next step

    _COLUMNS = ("sample", "key", "prompt_length", "own_start", "length", "num_drawn", "limit", "tokens", "log_probs")

    @property
    def num_running(self) -> int:
        return self.end - len(self.holes)

    @property
    def num_free(self) -> int:
        return self.num_rows - self.num_running

    def grow(self, num_rows: int) -> None:
        """Have `num_rows` rows."""
        for name in self._COLUMNS:
            old = getattr(self, name)
            new = np.zeros((num_rows, *old.shape[1:]), dtype=old.dtype)
            new[: self.end] = old[: self.end]
            setattr(self, name, new)
        self.groups = [*self.groups[: self.end], *[None] * (num_rows - self.end)]
        self.num_rows = num_rows

    def place(self, group: Group, sample: int, key: int, own_start: int) -> int:
        """Put a sample in a free row; returns the row."""
        if self.holes:
            row = self.holes.pop()
        else:
            row, self.end = self.end, self.end + 1
        self.groups[row] = group
        self.sample[row], self.key[row], self.num_drawn[row] = sample, key, group.request.num_drawn
        self.prompt_length[row], self.own_start[row], self.length[row] = group.num_tokens, own_start, 0
        limit = group.request.max_new_tokens
        self.limit[row] = self.max_new_tokens if limit is None else max(1, min(limit, self.max_new_tokens))
        if group.drawn is not None:  # it continues as if it had never left its row
            tokens, log_probs = group.drawn
            count = len(tokens)
            self.tokens[row, :count], self.log_probs[row, :count], self.length[row] = tokens, log_probs, count
            self.prompt_length[row] -= count
            self.own_start[row] -= count
        return row

    def record(self, rows: np.ndarray, tokens: np.ndarray, log_probs: np.ndarray) -> None:
        """Append one token to each of `rows`."""
        self.tokens[rows, self.length[rows]] = tokens
        self.log_probs[rows, self.length[rows]] = log_probs
        self.length[rows] += 1

    def draft(self, row: int, tokens: list[int]) -> None:
        """Have the next step verify `tokens` behind the newest token of a row."""
        if tokens:
            self._drafts[row] = tokens

    def drop_drafts(self) -> None:
        self._drafts.clear()

    def num_drafts(self) -> np.ndarray:
        """int64 [rows]: drafts of each running row."""
        counts = np.zeros(self.end, dtype=np.int64)
        for row, tokens in self._drafts.items():
            counts[row] = len(tokens)
        return counts

    def inputs(self) -> StepInputs:
        """The tokens of the next step; any token in place of a hole."""
        newest = self.tokens[np.arange(self.end), self.length[: self.end] - 1]
        if not self._drafts:
            return StepInputs.of(np.arange(self.end), newest)
        counts = 1 + self.num_drafts()
        rows = np.repeat(np.arange(self.end), counts)
        ahead = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        ids = newest[rows]
        ids[ahead > 0] = [token for row in sorted(self._drafts) for token in self._drafts[row]]
        return StepInputs(rows, ahead, ids)

    def remove(self, row: int) -> None:
        self.groups[row] = None
        self.holes.append(row)

    def close_holes(self) -> list[tuple[int, int]]:
        """Move the last rows into the holes; returns the moves (source, target), all sources behind all targets."""
        moves = []
        holes = sorted(self.holes)
        self.holes = []
        while holes:
            self.end -= 1
            if holes[-1] == self.end:
                holes.pop()
                continue
            moves.append((self.end, holes.pop(0)))
        for source, target in moves:
            self.groups[target], self.groups[source] = self.groups[source], None
            for name in self._COLUMNS:
                column = getattr(self, name)
                column[target] = column[source]
        return moves

    def own_lengths(self) -> np.ndarray:
        """int64 [rows]: tokens that each running row has in the row store; its newest is not yet there."""
        return self.own_start[: self.end] + self.length[: self.end] - 1

    def positions(self) -> np.ndarray:
        """int64 [rows]: position of each running row's newest token, counted in tokens."""
        return self.prompt_length[: self.end] + self.length[: self.end] - 1

    def shifts(self) -> np.ndarray:
        """int64 [rows]: the difference of a row's positions to their count, behind images."""
        return np.array([0 if g is None else g.shift for g in self.groups[: self.end]], dtype=np.int64)


def place_images(
    module: HFModule, chunks: Sequence[tuple[Group, Chunk]], first: int, device: torch.device
) -> tuple[list[PlacedMedia], list[int]]:
    """Returns (images of `chunks`, shift of positions at the start of each chunk). Tokens of `chunks` lie back to back from
    token `first` on. A shift comes from images with stored keys. Also sets the shift of each group."""
    placed, shifts, start = [], [], first
    for group, chunk in chunks:
        end = start + chunk.end - chunk.start
        group.shift = before = 0
        for span in group.request.placed:
            ids = torch.tensor(group.request.token_ids[span.start : span.start + span.length], device=device)
            shift = positions_within(module, ids, span.media)[1]
            group.shift += shift
            if span.start < chunk.start:
                before += shift
            else:
                placed.append(PlacedMedia(start + span.start - chunk.start, span.length, end, span.media))
        shifts.append(before)
        start = end
    return placed, shifts


def features_of(module: HFModule, tokens: torch.Tensor, placed: Sequence[PlacedMedia]) -> ImageFeatures | None:
    """The features of the images `placed` in `tokens` (int64 [tokens]); None without images. The features of each prompt are
    computed by themselves, so that their bits do not depend on other prompts."""
    parts = (image_features(module, tokens[None], [item]) for item in placed)
    return ImageFeatures.joined([part for part in parts if part is not None])
