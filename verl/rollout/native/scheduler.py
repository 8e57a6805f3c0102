"""Which prompt is computed when, and which sample sits in which slot. Host bookkeeping of one `generate`; no model here.

    waiting --take_pieces--> prefilling --(last piece)--> ready --start--> rows of the batch --end--> completion

A group is a prompt with its n samples. Groups hold a slot of the prefix store from their first piece until they need it no
more; rows hold a slot of the own store. Both kinds of slots are kept dense, so that attention runs over plain slices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from verl.data_proto.samples import PromptRequest
from verl.rollout.layout import Piece


@dataclass(eq=False)
class Group:
    """A prompt and how far it has come."""

    index: int  # position among the prompts of the call
    request: PromptRequest
    slot: int = -1  # of the prefix store
    num_computed: int = 0  # prompt tokens whose keys and values are stored
    num_started: int = 0  # samples
    num_ended: int = 0
    logits: torch.Tensor | None = None  # [vocab], after the last prompt token, while samples are yet to start

    @property
    def num_tokens(self) -> int:
        return len(self.request.token_ids)


class Schedule:
    """Order of the prompts: longest first, so that neighbours have similar lengths and the long ones do not come last."""

    def __init__(self, prompts: Sequence[PromptRequest], num_samples: int):
        groups = [Group(i, prompt) for i, prompt in enumerate(prompts)]
        self.num_samples = num_samples
        self.waiting = deque(sorted(groups, key=lambda g: -g.num_tokens))
        self.prefilling: deque[Group] = deque()
        self.ready: deque[Group] = deque()
        self.by_slot: list[Group] = []  # groups that hold a prefix slot

    @property
    def pending(self) -> bool:
        """Whether samples have yet to start."""
        return bool(self.waiting or self.prefilling or self.ready)

    def take_pieces(
        self, num_free_rows: int, budget: int, piece_tokens: int | None = None
    ) -> list[tuple[Group, Piece]]:
        """Prompt tokens to compute next: for as many prompts as there are rows free for their samples, and at most
        `budget` tokens. With `piece_tokens` every prompt is cut where its own length says, and a first piece is taken
        whatever the budget."""
        begun = sum(self.num_samples - g.num_started for g in (*self.ready, *self.prefilling))
        while self.waiting and begun < num_free_rows:
            group = self.waiting.popleft()
            group.slot = len(self.by_slot)
            self.by_slot.append(group)
            self.prefilling.append(group)
            begun += self.num_samples
        pieces: list[tuple[Group, Piece]] = []
        while self.prefilling and budget > 0:
            group = self.prefilling[0]
            end = min(group.num_tokens, group.num_computed + (piece_tokens or budget))
            if pieces and end - group.num_computed > budget:
                break
            pieces.append((group, Piece(group.slot, group.num_computed, end)))
            budget -= end - group.num_computed
            group.num_computed = end
            if end == group.num_tokens:
                self.ready.append(self.prefilling.popleft())
        return pieces

    def start(self, num_free_rows: int) -> list[tuple[Group, int]]:
        """(group, sample) of the samples that start now, at most `num_free_rows`."""
        started: list[tuple[Group, int]] = []
        while self.ready and len(started) < num_free_rows:
            group = self.ready[0]
            started.append((group, group.num_started))
            group.num_started += 1
            if group.num_started == self.num_samples:
                self.ready.popleft()
        return started

    def leave_slot(self, group: Group) -> Group | None:
        """Give back the group's prefix slot. Returns the group that takes it over, if one must move to keep slots dense;
        its tokens are still in the last slot."""
        last = self.by_slot.pop()
        if last is group:
            return None
        self.by_slot[group.slot] = last
        last.slot = group.slot
        return last


class Rows:
    """The running samples as columns; row r owns slot r of the own store. Rows below `end` are running, but for `holes`."""

    def __init__(self, num_rows: int, max_new_tokens: int):
        self.num_rows = num_rows
        self.end = 0
        self.holes: list[int] = []
        self.groups: list[Group | None] = [None] * num_rows
        self.sample = np.zeros(num_rows, dtype=np.int64)
        self.key = np.zeros(num_rows, dtype=np.int64)  # of its random numbers
        self.prompt_length = np.zeros(num_rows, dtype=np.int64)
        self.own_start = np.zeros(num_rows, dtype=np.int64)  # prompt tokens in the own store
        self.length = np.zeros(num_rows, dtype=np.int64)  # response tokens drawn
        self.num_drawn = np.zeros(num_rows, dtype=np.int64)  # before this call, see PromptRequest
        self.tokens = np.zeros((num_rows, max_new_tokens), dtype=np.int64)
        self.log_probs = np.zeros((num_rows, max_new_tokens))

    @property
    def num_running(self) -> int:
        return self.end - len(self.holes)

    @property
    def num_free(self) -> int:
        return self.num_rows - self.num_running

    def place(self, group: Group, sample: int, key: int, own_start: int) -> int:
        """Put a sample in a free row; returns the row."""
        if self.holes:
            row = self.holes.pop()
        else:
            row, self.end = self.end, self.end + 1
        self.groups[row] = group
        self.sample[row], self.key[row], self.num_drawn[row] = sample, key, group.request.num_drawn
        self.prompt_length[row], self.own_start[row], self.length[row] = group.num_tokens, own_start, 0
        return row

    def record(self, rows: np.ndarray, tokens: np.ndarray, log_probs: np.ndarray) -> None:
        """Append one token to each of `rows`."""
        self.tokens[rows, self.length[rows]] = tokens
        self.log_probs[rows, self.length[rows]] = log_probs
        self.length[rows] += 1

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
            for column in (
                self.sample, self.key, self.prompt_length, self.own_start, self.length, self.num_drawn, self.tokens,
                self.log_probs,
            ):  # fmt: skip
                column[target] = column[source]
        return moves

    def newest(self) -> np.ndarray:
        """int64 [rows]: the last token of each running row, the next forward's input (no holes)."""
        return self.tokens[np.arange(self.end), self.length[: self.end] - 1]

    def own_lengths(self) -> np.ndarray:
        """int64 [rows]: tokens that each running row has in the own store; its newest is not yet there."""
        return self.own_start[: self.end] + self.length[: self.end] - 1

    def positions(self) -> np.ndarray:
        """int64 [rows]: position of each running row's newest token."""
        return self.prompt_length[: self.end] + self.length[: self.end] - 1
