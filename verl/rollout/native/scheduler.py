"""The scheduler of the native engine: continuous batching over a backend that computes on a CPU or a GPU. No model here.

    add ──► Prompts (waiting, prefilling, ready) ──► Rows ──► Completion

A backend may run one step ahead of the host (`lag`): then a sample that ended takes part in one more step, in vain.
"""

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from verl.data_proto.samples import Completion, PromptRequest, SampleKey
from verl.rollout.layout import Chunk
from verl.rollout.native.batch import NOTHING_SAVED, BatchRows, Group, Prompts, SavedTokens, StepInputs
from verl.rollout.native.experts import ExpertRecords
from verl.rollout.native.recording import SlotRecords
from verl.rollout.requests import OpenSamples, StopRules, random_keys

if TYPE_CHECKING:
    from verl.rollout.native.drafts.drafter import Drafter


class Sampled(Protocol):
    """Tokens of one step, perhaps still on their way to the host."""

    def wait(self) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, log-probs), each [rows]."""
        ...


class Backend(Protocol):
    """Computes the steps of a scheduler, and reads its `rows` and `prompts`. `lag` is the number of unfinished steps at the
    launch of the next step: 0, or 1 if the device keeps the newest tokens itself. Prompts of `ahead` samples are computed
    before rows are free, in batches: 0 if the launches of a forward cost nothing. `joins_prompts`: equal ones once."""

    joins_prompts: bool
    lag: int
    num_computed: int  # prompt tokens

    @property
    def ahead(self) -> int: ...

    def reserve(self, num_rows: int, longest_prompt: int) -> int:
        """Reserve memory for this many rows and a prompt of this length; returns the number of rows that fit."""

    def admits(self, group: Group) -> bool:
        """Whether a group fits the reserved size, and a prefix slot is free for it."""

    def load(self, group: Group) -> None:
        """Put `group.saved.values` into its prefix slot."""

    def save(self, row: int) -> Any:
        """A copy of the keys and values of a row, its prompt included, for `load`."""

    def start(self, rows: np.ndarray, logits: torch.Tensor) -> Sampled:
        """Sample the first tokens of the new `rows` from `logits` [rows, vocab]."""

    def step(self, chunks: list[tuple[Group, Chunk]]) -> tuple[Sampled | None, torch.Tensor]:
        """Compute all rows and `chunks`. Returns the rows' next tokens (None without rows), and the logits after the groups
        that `chunks` complete, [groups, vocab]."""

    def move_rows(self, sources: list[int], targets: list[int]) -> None:
        """Move rows to other places of the stores."""

    def move_prompt(self, source: int, target: int, length: int) -> None:
        """Move a prompt to another prefix slot."""

    def copy_prompt(self, source: int, target: int, length: int) -> None:
        """Copy a prompt to a new prefix slot."""

    def room(self) -> int:
        """Number of samples that can start now; negative when blocks are missing for the next tokens of the running samples."""

    def rows_changed(self) -> None:
        """Called after samples have started or ended, or a prompt has moved."""


def num_bytes_of(saved: Any) -> int:
    """Bytes of what Backend.save returned."""
    if isinstance(saved, torch.Tensor):
        return saved.numel() * saved.element_size()
    return sum(map(num_bytes_of, saved.values() if isinstance(saved, dict) else saved or ()))


class Scheduler:
    """Requests in by `add`, finished samples out by `step`. With `shared` prompts the samples of a group read one copy of its
    prompt. Else a prompt moves into the slot of each of its samples.

    `max_num_seqs` bounds the rows, `max_num_batched_tokens` the tokens of a step.
    Keys and values of kept samples take at most `max_saved_bytes` (None: no limit). The longest idle are
    dropped, and computed again when their sample continues. A sample that ends by its limit with fewer than `resumes_below`
    tokens continues in a later generation: its keys and values go to `paused`, unless that is None.
    """

    def __init__(
        self,
        samples: OpenSamples,
        stop: StopRules,
        *,
        step: int,
        weight_version: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        shared: bool,
        max_saved_bytes: int | None = None,
        paused: dict[SampleKey, SavedTokens] | None = None,
        resumes_below: int = 0,
    ):
        self.samples, self.params, self.stop = samples, samples.params, stop
        self.step_number, self.weight_version, self.shared = step, weight_version, shared
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_saved_bytes, self.resumes_below = max_saved_bytes, 0 if paused is None else resumes_below
        self.experts: ExpertRecords | None = None  # for routing replay
        self.slots: SlotRecords | None = None  # for updates that read the sampler's activations
        self.drafter: Drafter | None = None
        self.grammars: Any = None  # verl.agents.grammars.Grammars, once a request has one
        self.backend: Backend
        self.prompts, self.rows = Prompts(), BatchRows(self.params.max_new_tokens)
        self.longest_prompt = self.num_decode_steps = self.num_row_steps = self.max_running = self.num_preempted = 0
        self._flight: deque[tuple[StepInputs, Sampled]] = deque()  # row -1 for a sample that ended
        self._saved = {} if paused is None else paused  # in order of ending
        self._num_saved_bytes = self.num_evicted = 0
        self._ended: list[Completion] = []
        self._has_new = self._has_stops = False

    @property
    def is_finished(self) -> bool:
        """Whether no sample is running or waits."""
        return self.prompts.is_empty and not self.rows.num_running and not self._flight

    @property
    def lacks_samples(self) -> bool:
        """Whether a row is free and no sample waits for one."""
        return self.prompts.is_empty and self.rows.num_free > 0

    def add(self, request: PromptRequest) -> None:
        """Queue a request of OpenSamples.admit."""
        count = request.num_samples or self.params.n
        saved = self._drop_saved((request.ordinal, request.first_sample)) if request.num_drawn else NOTHING_SAVED
        group = Group(request, deque(range(count)), count, saved)
        self.prompts.waiting.append(group)
        self._has_stops |= bool(request.stop)
        self.longest_prompt = max(self.longest_prompt, group.num_tokens)
        self._has_new = True

    def pause(self) -> list[Completion]:
        """End the running samples where they are, with the reason "length", as a limit of tokens does."""
        self._ended = []
        self._read_all_but(0)
        for row in [row for row, group in enumerate(self.rows.groups[: self.rows.end]) if group is not None]:
            self._end(row, False)
        return self._ended

    def abort(self, keys: Iterable[SampleKey]) -> None:
        """Drop samples, running or saved."""
        dropped = set(keys)
        for key in dropped:
            self._drop_saved(key)
        for row, group in enumerate(self.rows.groups[: self.rows.end]):
            if group is not None and self._key(group, int(self.rows.sample[row])) in dropped:
                self._remove(row)
        for group in self.prompts.groups():
            pending = deque(number for number in group.pending if self._key(group, number) not in dropped)
            group.num_live -= len(group.pending) - len(pending)
            group.pending = pending
            if not pending:
                self.prompts.drop(group)
                self._leave_prefix(group)

    def step(self) -> list[Completion]:
        """One step of all rows with the next chunks of prompts; returns the samples that it ended."""
        self._ended = []
        if self._has_new or (self.prompts.waiting and not self.rows.num_running and not self.prompts.prefilling):
            self._reserve()
        self._make_room()
        self._start()
        budget = max(self.max_num_batched_tokens - self.rows.num_running, 0)
        if self.rows.num_running == 0:
            budget = max(budget, 1)
        joins = self.backend.joins_prompts and self.experts is None and self.slots is None
        chunks = self.prompts.take_chunks(self.rows.num_free, budget, self.backend.admits, self.backend.ahead, joins)
        self._advance(chunks)
        return self._ended

    def _advance(self, chunks: list[tuple[Group, Chunk]]) -> None:
        """Compute the rows with their drafts, and `chunks`; read the steps that the backend has finished."""
        began, before, num_inputs = time.perf_counter(), self.rows.length[: self.rows.end].copy(), 0
        if self.drafter is not None and self.rows.num_running and not chunks:
            self.drafter.propose(self.max_num_batched_tokens - self.rows.end)
            if self.backend.room() < 0:
                self.rows.drop_drafts()
        if chunks or self.rows.num_running:
            num_inputs = self._launch(chunks)
        self._read_all_but(self.backend.lag if self.rows.num_running else 0)
        if self.drafter is not None and num_inputs:
            self.drafter.note(before, num_inputs, None if chunks else time.perf_counter() - began)

    def _reserve(self) -> None:
        """Rows for the samples that there are now."""
        if not self.rows.num_running:
            self.rows.close_holes()
        if self._has_new:
            self.prompts.sort()
            self._has_new = False
        num_needed = min(self.max_num_seqs, len(self.samples.running))
        allowed = self.backend.reserve(max(num_needed, self.rows.num_rows), self.longest_prompt)
        if allowed > self.rows.num_rows or (allowed < self.rows.num_rows and not self.rows.end):
            self.rows.grow(allowed)

    # -- samples start and end

    def _start(self) -> None:
        """Start samples with a computed prompt, up to the number of free rows, and sample their first tokens."""
        while self.prompts.ready and self.rows.num_free and (room := self.backend.room()) > 0:
            started = self.prompts.start(min(self.rows.num_free, room))
            logits = torch.stack([g.logits for g, _ in started if g.logits is not None])
            rows = self._place(started)
            self._flight.append((StepInputs.of(rows), self.backend.start(rows, logits)))
            for group in dict.fromkeys(g for g, _ in started):
                if not group.pending:
                    group.logits, group.saved = None, NOTHING_SAVED
                    self._leave_prefix(group)
            if not self.backend.lag:
                self._read_all_but(0)
        if moves := self.rows.close_holes():
            sources, targets = [s for s, _ in moves], [t for _, t in moves]
            for inputs, _ in self._flight:
                for source, target in moves:
                    inputs.rows[inputs.rows == source] = target
            self.backend.move_rows(sources, targets)
            self.backend.rows_changed()

    def _make_room(self) -> None:
        """Preempt until the running samples' next tokens fit: prompts that no sample reads yet, the last one first, then the
        sample that started last. It is computed again up to its last token, and continues with the same random numbers."""
        while (room := self.backend.room()) < 0 or (room == 0 and not self.rows.num_running and self.prompts.ready):
            begun = [g for g in (*self.prompts.ready, *self.prompts.prefilling) if g.num_live == len(g.pending)]
            if begun and (len(begun) > 1 or self.rows.num_running):
                self.prompts.drop(begun[-1])
                begun[-1].num_computed, begun[-1].logits, begun[-1].experts = begun[-1].saved.num_tokens, None, []
                self._free_prefix(begun[-1])
                self.prompts.waiting.appendleft(begun[-1])
            else:
                self._preempt()

    def _preempt(self) -> None:
        running = [row for row, group in enumerate(self.rows.groups[: self.rows.end]) if group is not None]
        row = min(running, key=lambda r: int(self.rows.length[r]))
        group, length = self.rows.groups[row], int(self.rows.length[row])
        assert group is not None
        tokens, log_probs = self.rows.tokens[row, :length].copy(), self.rows.log_probs[row, :length].copy()
        prompt = group.request.token_ids[: int(self.rows.prompt_length[row])]
        first = group.request.first_sample + int(self.rows.sample[row])
        tokens_so_far, images = (*prompt, *tokens.tolist()), group.request.placed  # all before the sampled tokens
        request = replace(
            group.request, token_ids=tokens_so_far, first_sample=first, num_samples=1, media=None, spans=images
        )
        # keys of older weights cannot be computed again
        saved = self._held(row) if self.resumes_below else NOTHING_SAVED
        self._remove(row)
        self.prompts.waiting.appendleft(Group(request, deque([0]), 1, saved, drawn=(tokens, log_probs)))
        self.num_preempted += 1

    def _place(self, started: list[tuple[Group, int]]) -> np.ndarray:
        requests = [g.request for g, _ in started]
        numbers = [g.request.first_sample + s for g, s in started]
        keys = random_keys(self.params.seed, self.step_number, requests, numbers).tolist()
        rows = [
            self.rows.place(group, number, key, 0 if self.shared else group.num_tokens)
            for (group, number), key in zip(started, keys, strict=True)
        ]
        if self.drafter is not None:
            self.drafter.begin(rows)
        self.max_running = max(self.max_running, self.rows.num_running)
        self.backend.rows_changed()
        return np.array(rows)

    def _leave_prefix(self, group: Group) -> None:
        """Give the group's prefix slot back when nothing reads it any more."""
        if group.slot < 0 or group.pending or (self.shared and group.num_live):
            return
        self._free_prefix(group)

    def _free_prefix(self, group: Group) -> None:
        last_slot = len(self.prompts.by_slot) - 1
        moved = self.prompts.leave_slot(group)
        if moved is not None:
            self.backend.move_prompt(last_slot, moved.slot, moved.num_computed)
        self.backend.rows_changed()

    def _end(self, row: int, stopped: bool) -> None:
        """Return the sample of a row and free it."""
        group, length, number = self.rows.groups[row], int(self.rows.length[row]), int(self.rows.sample[row])
        assert group is not None
        key = self._key(group, number)
        tokens, log_probs = self.rows.tokens[row, :length].tolist(), self.rows.log_probs[row, :length].tolist()
        experts = None if self.experts is None else self.experts.of(key, group)
        if self.slots is not None:
            self.slots.end(key, group, tokens)
        done = self.samples.finish(key, tokens, log_probs, StopRules.reason(stopped), self.weight_version, experts)
        if self.samples.keep or (not stopped and group.request.num_drawn + length < self.resumes_below):
            self._save(key, self._held(row))
        self._remove(row, has_ended=True)
        self._ended.append(done)

    def _held(self, row: int) -> SavedTokens:
        """Keys and values of all tokens of a row but the last."""
        num_tokens = int(self.rows.prompt_length[row] + self.rows.length[row]) - 1
        return SavedTokens(self.backend.save(row), num_tokens, self.step_number)

    def _save(self, key: SampleKey, saved: SavedTokens) -> None:
        """Keep keys and values for the next turn or part, within the budget."""
        self._saved[key] = saved
        self._num_saved_bytes += num_bytes_of(saved.values)
        while self.max_saved_bytes is not None and self._num_saved_bytes > self.max_saved_bytes and self._saved:
            self._drop_saved(next(iter(self._saved)))
            self.num_evicted += 1

    def _drop_saved(self, key: SampleKey) -> SavedTokens:
        saved = self._saved.pop(key, NOTHING_SAVED)
        self._num_saved_bytes -= num_bytes_of(saved.values)
        return saved

    def _remove(self, row: int, *, has_ended: bool = False) -> None:
        group = self.rows.groups[row]
        assert group is not None
        if self.experts is not None:
            self.experts.drop(self._key(group, int(self.rows.sample[row])))
        if self.slots is not None:
            self.slots.drop(self._key(group, int(self.rows.sample[row])))
        if self.drafter is not None:
            self.drafter.end(row, has_ended=has_ended)
        self.rows.remove(row)
        for inputs, _ in self._flight:
            inputs.rows[inputs.rows == row] = -1
        group.num_live -= 1
        self._leave_prefix(group)
        self.backend.rows_changed()

    def _stops(self, row: int) -> tuple[str, ...]:
        group = self.rows.groups[row]
        return () if group is None else group.request.stop

    @staticmethod
    def _key(group: Group, number: int) -> SampleKey:
        return group.request.ordinal, group.request.first_sample + number

    # -- tokens

    def _launch(self, chunks: list[tuple[Group, Chunk]]) -> int:
        """Begin a step; returns the tokens of its rows."""
        for group, chunk in chunks:
            if group.saved.values is not None and chunk.start == group.saved.num_tokens:
                self.backend.load(group)
        inputs = self.rows.inputs()
        sampled, logits = self.backend.step(chunks)
        self.rows.drop_drafts()
        completed = [group for group, chunk in chunks if chunk.end == group.num_tokens]
        for group, row in zip(completed, logits, strict=True):
            group.logits = row
            for twin in self.prompts.join(group):
                self.backend.copy_prompt(group.slot, twin.slot, group.num_tokens)
        if sampled is not None:
            self._flight.append((inputs, sampled))
            self.num_decode_steps += 1
            self.num_row_steps += self.rows.end
        return len(inputs.rows)

    def _read_all_but(self, num_left: int) -> None:
        """Record the tokens of finished steps, up to the first wrong draft of each row; end the samples that they finish."""
        while len(self._flight) > num_left:
            inputs, sampled = self._flight.popleft()
            tokens, log_probs = sampled.wait()
            now = np.flatnonzero((inputs.ahead == 0) & (inputs.rows >= 0))
            while len(now):
                is_running = self._record(inputs.rows[now], tokens[now], log_probs[now])
                behind = now[is_running] + 1
                behind = behind[behind < len(tokens)]
                now = behind[(inputs.ahead[behind] > 0) & (inputs.ids[behind] == tokens[behind - 1])]

    def _record(self, rows: np.ndarray, tokens: np.ndarray, log_probs: np.ndarray) -> np.ndarray:
        """Record a token of each of `rows`; returns bool [rows], whether its sample runs on."""
        self.rows.record(rows, tokens, log_probs)
        stopped, finished = self.stop.finished(tokens, self.rows.length[rows], self.rows.limit[rows])
        if self.stop.has_strings or self._has_stops:
            by_string = [
                self.stop.ends_string(self.rows.tokens[r, : self.rows.length[r]], self._stops(r)) for r in rows
            ]
            stopped |= np.array(by_string, dtype=bool)
            finished |= stopped
        for i in np.flatnonzero(finished).tolist():
            self._end(int(rows[i]), bool(stopped[i]))
        return ~finished
