"""Drafts: guesses of the next tokens of running samples, which one step verifies together (Leviathan et al. 2023,
arXiv:2211.17192; guesses by look-up: Saxena 2023, and from earlier responses: Oliaro et al. 2024, arXiv:2411.04975).
A draft model guesses behind samples for which no text does.

    step without drafts   newest token ──► next token
    step with drafts      newest token, drafts ──► the tokens of their random numbers, up to the first that is no draft

A row takes the token that its random number gives, whatever was drafted. So drafts save steps and change no sample, as far as
kernels compute a token's bits with any neighbours.
"""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from verl.config.sections.rollout import SpeculativeConfig
from verl.data_proto.samples import SamplingParams
from verl.models.hf_module import HFModule
from verl.rollout.layout import Chunk
from verl.rollout.native.batch import BatchRows, Group, StepInputs
from verl.rollout.native.drafts.costs import Acceptance, DraftMemory
from verl.rollout.native.drafts.head import DraftHead, require_head
from verl.rollout.native.drafts.model import MOST_CONTEXT, MOST_SAMPLES, DraftFollower, require_kernels
from verl.rollout.native.drafts.texts import OF_MODEL, Guess, TextIndex
from verl.rollout.sampling import sample
from verl.rollout.uniforms import uniforms_at

_LEAST_GAIN = 1.03  # expected tokens per second against a step without drafts
_MOST_LEAST = 0.85  # certainty that a draft needs to gain time; above it none is looked up
_MOST_PAUSE = 8  # steps without a look-up after look-ups that chose no draft
_MOST_CERTAIN = 0.98
_MOST_OF_ROW = 32  # expected right guesses of a row, before older ones count half
_ROW_WEIGHT = 4.0  # accepted guesses that a row is assumed to have had as expected
_TRIAL_STEPS = 64  # without the draft model, until one guess of it is tried again


def require_drafts(policy: HFModule, config: SpeculativeConfig) -> None:
    """Raise ConfigError if the policy has no head that guesses, or the kernels do not compute the draft model."""
    if "mtp" in config.methods:
        require_head(policy)
    if "model" in config.methods and Path(str(config.model_path)).is_dir():
        require_kernels(str(config.model_path), next(policy.parameters()).dtype)


class _Row:
    """A running sample: its prompt's index, the name of its response there, and the accuracy of its guesses."""

    def __init__(self, index: TextIndex, name: tuple[int, int]):
        self.index, self.name = index, name
        self.num_right = self.num_expected = _ROW_WEIGHT

    def certainty(self, acceptance: Acceptance, guess: Guess) -> float:
        """The probability that a guess is right if the guesses before it are."""
        return min(_MOST_CERTAIN, acceptance.of(guess) * self.num_right / self.num_expected)

    def note(self, certainty: float, is_right: bool) -> None:
        """A guess of this certainty among all rows was right or wrong."""
        self.num_right += is_right
        self.num_expected += certainty
        if self.num_expected > _MOST_OF_ROW:
            self.num_right, self.num_expected = self.num_right / 2, self.num_expected / 2


class _Drafted(NamedTuple):
    """Guesses of a row behind its first `length` tokens, each with the probability that it and all before are right. It can
    have at most `limit`."""

    number: int
    row: _Row
    length: int
    limit: int
    guesses: list[Guess]
    certainties: list[float]


class Drafter:
    """Drafts for the running samples `rows` of a generation."""

    def __init__(self, memory: DraftMemory, rows: BatchRows, params: SamplingParams):
        self._memory, self._rows, self._params = memory, rows, params
        self._head = memory.model if isinstance(memory.model, DraftHead) else None
        self._seen: list[
            tuple[int, tuple[int, int], int, torch.Tensor]
        ] = []  # (row, name, position, states) of this step
        self._config, self._costs = memory.config, memory.costs
        self._acceptance = memory.acceptance.setdefault(params.temperature, Acceptance())
        self._running: dict[tuple[Group, int], _Row] = {}
        self._indices: dict[tuple[int, ...], TextIndex] = {}
        self._drafted: list[_Drafted] = []
        self._num_paused = self._pause = 0
        self._model_s = 0.0  # of the draft model in this step
        self.num_drafts = self.num_accepted = 0
        self.num_saved_steps = 0.0

    def propose(self, num_tokens: int) -> None:
        """Give the rows their drafts of the next step, at most `num_tokens`."""
        rows, self._drafted, self._model_s = self._rows, [], 0.0
        now = self._costs.of(rows.end)
        least = (self._costs.of(rows.end + 1) / now - 1) * rows.end  # a less certain draft costs more than it gains
        if least > _MOST_LEAST:
            return
        if self._num_paused:
            self._num_paused -= 1
            return
        self._drafted = [self._guess(number, least) for number in range(rows.end)]
        if self._memory.model is not None:
            self._ask_model(self._memory.model, least, now)
        ranked = sorted(((c, d.number) for d in self._drafted for c in d.certainties), reverse=True)[
            : max(num_tokens, 0)
        ]
        num_chosen = self._best_count([certainty for certainty, _ in ranked], now)
        self._num_paused = self._pause = 0 if num_chosen else min(_MOST_PAUSE, 2 * self._pause + 1)
        counts = np.bincount([number for _, number in ranked[:num_chosen]], minlength=rows.end)
        for drafted, count in zip(self._drafted, counts.tolist(), strict=True):
            rows.draft(drafted.number, [guess.token for guess in drafted.guesses[:count]])

    def begin(self, numbers: Sequence[int]) -> None:
        """Samples have started in these rows."""
        for number in numbers:
            group = self._rows.groups[number]
            if group is not None and group.states is not None and self._head is not None:
                name = _name(group, int(self._rows.sample[number]))
                self._head.see(name, group.num_tokens - len(group.states), group.states)

    def see(self, states: torch.Tensor, inputs: StepInputs, chunks: Sequence[tuple[Group, Chunk]]) -> None:
        """The states of a step's tokens: of `inputs`, then of `chunks`. Their use is noted in `note`."""
        if self._head is None:
            return
        rows, ends = self._rows, np.append(np.flatnonzero(inputs.ahead == 0), len(inputs.rows)).tolist()
        positions = rows.positions().tolist()
        self._seen = [
            (number, _name(group, int(rows.sample[number])), positions[number], states[ends[number] : ends[number + 1]])
            for number, group in enumerate(rows.groups[: rows.end])
            if group is not None
        ]
        parts = states[len(inputs.rows) :].split([chunk.end - chunk.start for _, chunk in chunks])
        for (group, chunk), part in zip(chunks, parts, strict=True):
            earlier = () if group.states is None or chunk.start == group.saved.num_tokens else (group.states,)
            group.states = torch.cat([*earlier, part])[-MOST_CONTEXT:].clone()

    def note(self, before: np.ndarray, num_tokens: int, seconds: float | None) -> None:
        """A step of `num_tokens` has ended, and the rows have its tokens behind `before`, int64 [rows]. `seconds` is None if
        prompts were computed too."""
        rows, num_rows = self._rows, len(before)
        num_accepted = int((rows.length[:num_rows] - before).sum()) - num_rows
        if seconds is not None:
            self._costs.note(num_tokens, seconds - self._model_s)
            self._memory.account(num_rows, num_tokens, seconds - self._model_s, self._model_s, num_accepted)
        self.num_drafts += num_tokens - num_rows
        self.num_accepted += num_accepted
        self.num_saved_steps += num_accepted / num_rows
        for number, row, length, _, guesses, _ in self._drafted:
            for guess, token in zip(guesses, rows.tokens[number, length : rows.length[number]].tolist(), strict=False):
                row.note(self._acceptance.of(guess), guess.token == token)
                self._acceptance.note(guess, guess.token == token)
                if guess.token != token:
                    break
        self._drafted = []
        for number, name, start, states in self._seen:
            if self._head is not None:
                self._head.see(name, start, states[: rows.length[number] - before[number]])
        self._seen = []

    def end(self, number: int, *, has_ended: bool) -> None:
        """The sample of a row leaves it; a sample that `has_ended` is a text for later ones."""
        group, sample = self._rows.groups[number], int(self._rows.sample[number])
        assert group is not None
        row = self._running.pop((group, sample), None)
        if has_ended:
            prompt, name = self._prompt_of(number, group), _name(group, sample)
            if row is not None:
                row.index.extend(name, self._response(number, group, row.index.length(name)))
            if "history" in self._config.methods:
                self._memory.history.add(prompt, name, self._response(number, group, 0))
        if row is not None and not any(other.index is row.index for other in self._running.values()):
            self._indices = {prompt: index for prompt, index in self._indices.items() if index is not row.index}

    def stats(self, num_steps: int) -> dict[str, float]:
        """See Generation.close; the generation took `num_steps`."""
        without = num_steps + self.num_saved_steps
        return {
            "accepted_per_step": self.num_accepted / num_steps if num_steps else 0.0,
            "saved_step_share": self.num_saved_steps / without if without else 0.0,
            "num_drafts": self.num_drafts,
            "num_accepted_drafts": self.num_accepted,
            "num_saved_steps": self.num_saved_steps,
        }

    def _best_count(self, certainties: Sequence[float], now: float) -> int:
        """The number of the most certain drafts with the most tokens per second; 0 unless they gain."""
        num_rows, expected = self._rows.end, float(self._rows.end)
        best, best_rate = 0, _LEAST_GAIN * num_rows / now
        may_lose = self._memory.may_lose(now) - self._model_s
        for count, certainty in enumerate(certainties, 1):
            expected += certainty
            cost = self._costs.of(num_rows + count)
            if expected / cost > best_rate and cost - now <= may_lose:
                best, best_rate = count, expected / cost
        return best

    def _ask_model(self, model: DraftFollower, least: float, now: float) -> None:
        """Guesses of the draft model for the rows without any."""
        self._memory.num_without_model += 1
        rows = self._rows
        running = [d for d in self._drafted if not d.guesses and d.limit > 0 and model.can_follow(d.row.name)][
            :MOST_SAMPLES
        ]
        num_missing = sum(self._follow_text(model, drafted) for drafted in running)
        for ahead in range(self._depth(len(running), num_missing, now)):
            running = [d for d in running if len(d.certainties) == ahead < d.limit]
            if not running:
                break
            began, numbers = time.perf_counter(), [d.number for d in running]
            logits = model.logits([d.row.name for d in running])
            positions = rows.length[numbers] + rows.num_drawn[numbers] + ahead
            u = uniforms_at(torch.from_numpy(rows.key[numbers]), torch.from_numpy(positions))
            tokens, log_probs = sample(logits, self._params, u)
            for drafted, token, log_prob in zip(running, tokens.tolist(), log_probs.tolist(), strict=True):
                guess = Guess(token, OF_MODEL, math.exp(log_prob))
                certainty = math.prod(drafted.certainties[-1:]) * drafted.row.certainty(self._acceptance, guess)
                if certainty >= least:
                    drafted.guesses.append(guess)
                    drafted.certainties.append(certainty)
                    model.push(drafted.row.name, token)
            spent_s = time.perf_counter() - began
            self._memory.model_costs.note(len(running) if ahead else num_missing, spent_s)
            self._model_s += spent_s
            self._memory.num_without_model = 0

    def _follow_text(self, model: DraftFollower, drafted: _Drafted) -> int:
        """The draft model reads the tokens of a row; returns the number that it has yet to compute."""
        index, name = drafted.row.index, drafted.row.name
        return model.follow(name, index.num_tokens(name), lambda start: index.tokens(name, start))

    def _depth(self, num_drafted: int, num_missing: int, now: float) -> int:
        """Forwards of the draft model, for as many rows, with the most tokens per second. 0 unless they gain, but now
        and then 1."""
        if not num_drafted:
            return 0
        num_rows, memory, share = self._rows.end, self._memory, self._acceptance.of_model()
        first, further = memory.model_cost(num_missing), memory.model_cost(num_drafted)
        best, best_rate, expected, may_lose = 0, _LEAST_GAIN * num_rows / now, float(num_rows), memory.may_lose(now)
        for depth in range(1, self._config.num_speculative_tokens + 1):
            expected += num_drafted * share**depth
            cost = self._costs.of(num_rows + depth * num_drafted)
            if cost - now + first + (depth - 1) * further > may_lose:
                break
            best = best or int(memory.num_without_model >= _TRIAL_STEPS)
            if expected / (cost + depth * further) > best_rate:  # missing tokens are computed once
                best, best_rate = depth, expected / (cost + depth * further)
        return best

    def _guess(self, number: int, least: float) -> _Drafted:
        rows, row = self._rows, self._follow(number)
        length = int(rows.length[number])
        limit = min(self._config.num_speculative_tokens, int(rows.limit[number]) - length - 1)
        drafted = _Drafted(number, row, length, limit, [], [])
        end, certainty = row.index.end(row.name), 1.0
        for _ in range(limit):
            guess = row.index.guess(row.name, end)
            if guess is None or (certainty := certainty * row.certainty(self._acceptance, guess)) < least:
                break
            drafted.guesses.append(guess)
            drafted.certainties.append(certainty)
            end.append(guess.token)
        return drafted

    def _follow(self, number: int) -> _Row:
        """The sample of a row, with its newest tokens in its index."""
        group, sample = self._rows.groups[number], int(self._rows.sample[number])
        assert group is not None
        row = self._running.get((group, sample))
        if row is None:
            index = self._index(self._prompt_of(number, group))
            row = self._running[group, sample] = _Row(index, _name(group, sample))
        row.index.extend(row.name, self._response(number, group, row.index.length(row.name)))
        return row

    def _index(self, prompt: tuple[int, ...]) -> TextIndex:
        if prompt not in self._indices:
            methods = self._config.methods
            index = TextIndex(prompt, ngram="ngram" in methods, history="history" in methods)
            for name, text in self._memory.history.of(prompt):
                index.extend(("earlier", name), text)
            self._indices[prompt] = index
        return self._indices[prompt]

    def _prompt_of(self, number: int, group: Group) -> tuple[int, ...]:
        """The prompt of a sample's first request."""
        return group.request.token_ids[: int(self._rows.prompt_length[number] - self._rows.num_drawn[number])]

    def _response(self, number: int, group: Group, start: int) -> list[int]:
        """The tokens of a row's response from number `start` on, over all of its requests."""
        rows = self._rows
        drawn, prompt_length = int(rows.num_drawn[number]), int(rows.prompt_length[number])
        earlier = group.request.token_ids[prompt_length - drawn + start : prompt_length]
        return [*earlier, *rows.tokens[number, max(0, start - drawn) : rows.length[number]].tolist()]


def _name(group: Group, sample: int) -> tuple[int, int]:
    return group.request.ordinal, group.request.first_sample + sample
