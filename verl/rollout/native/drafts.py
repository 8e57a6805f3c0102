"""Drafts: guesses of the next tokens of running samples, which one step verifies together (Leviathan et al. 2023,
arXiv:2211.17192; guesses by look-up: Saxena 2023, and from earlier responses: Oliaro et al. 2024, arXiv:2411.04975).

    step without drafts   newest token ──► next token
    step with drafts      newest token, drafts ──► the tokens of their random numbers, up to the first that is no draft

A row takes the token that its random number gives, whatever was drafted. So drafts save steps and change no sample, as far as
kernels compute a token's bits with any neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from verl.config.sections.rollout import SpeculativeConfig
from verl.rollout.native.batch import BatchRows, Group
from verl.rollout.native.draft_texts import MOST_MATCHED, Guess, History, TextIndex

_LEAST_GAIN = 1.03  # expected tokens per second against a step without drafts
_MOST_LEAST = 0.85  # certainty that a draft needs to gain time; above it none is looked up
_MOST_PAUSE = 8  # steps without a look-up after look-ups that chose no draft
_BOUND_ROWS = 8  # rows up to which a step on a CPU takes the time of reading the weights
_FADES = 256  # steps after which half of a measured time is forgotten
_NEWEST = 0.1  # least weight of the newest time of a step
_OUTLIER = 3.0  # times the expected time of a step
_MOST_TRIALS = 400  # of a kind of guess, before older ones count half
_MOST_CERTAIN = 0.98
_MOST_OF_ROW = 32  # expected right guesses of a row, before older ones count half
_ROW_WEIGHT = 4.0  # accepted guesses that a row is assumed to have had as expected


class StepCosts:
    """Seconds of a step by its number of tokens, as a factor of `_shape`. Sizes within a fifth of each other share a factor;
    others have the nearest one. Old factors fade to the newest."""

    def __init__(self) -> None:
        self._factors: dict[int, tuple[float, int, int]] = {}  # measurements, number of the newest step
        self._newest, self._num_steps = 1.0, 0

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step of `num_tokens` took so long."""
        size, factor = _size(num_tokens), seconds / _shape(num_tokens)
        _, count, _ = self._factors.get(size, (0.0, 0, 0))
        if self._num_steps:
            expected = self.of(num_tokens) / _shape(num_tokens)
            factor = min(factor, _OUTLIER * expected)
            if count:
                factor = expected + max(_NEWEST, 1 / (count + 1)) * (factor - expected)
        self._num_steps, self._newest = self._num_steps + 1, factor
        self._factors[size] = factor, count + 1, self._num_steps

    def of(self, num_tokens: int) -> float:
        """Expected seconds; in any unit before the first measurement."""
        size = _size(num_tokens)
        if size not in self._factors and self._factors:
            size = min(self._factors, key=lambda measured: abs(measured - size))
        factor, _, at = self._factors.get(size, (self._newest, 0, self._num_steps))
        weight = math.pow(0.5, (self._num_steps - at) / _FADES)
        return _shape(num_tokens) * (weight * factor + (1 - weight) * self._newest)


def _size(num_tokens: int) -> int:
    return round(4 * math.log2(num_tokens))


def _shape(num_tokens: int) -> float:
    """Seconds of a step on a CPU, up to a factor.

    Measured with a model of 135M: 17 ms with 1 and 8 rows, 23 with 16, 38 with 32, 73 with 64."""
    return max(num_tokens, _BOUND_ROWS) + _BOUND_ROWS


class Acceptance:
    """The share of right guesses, by matched tokens and share of votes."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int], list[float]] = {}  # right, all

    def of(self, guess: Guess) -> float:
        right, trials = self._counts_of(guess)
        return right / trials

    def note(self, guess: Guess, is_right: bool) -> None:
        counts = self._counts_of(guess)
        counts[0] += is_right
        counts[1] += 1
        if counts[1] > _MOST_TRIALS:
            counts[:] = counts[0] / 2, counts[1] / 2

    def _counts_of(self, guess: Guess) -> list[float]:
        kind = min(guess.matched, MOST_MATCHED) // 2, round(4 * guess.share)
        if kind not in self._counts:  # about what was measured at temperatures 0.6 and 1
            self._counts[kind] = [3 * guess.share * (0.35 + 0.03 * guess.matched), 3.0]
        return self._counts[kind]


@dataclass(eq=False)
class DraftMemory:
    """Times of steps, acceptance by temperature and earlier responses, which outlive a generation. They only decide how many
    drafts are tried."""

    config: SpeculativeConfig
    costs: StepCosts = field(default_factory=StepCosts)
    acceptance: dict[float, Acceptance] = field(default_factory=dict)
    history: History = field(init=False)

    def __post_init__(self) -> None:
        self.history = History(self.config.history_mb << 20 if "history" in self.config.methods else 0)


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
    """Guesses of a row behind its first `length` tokens, each with the probability that it and all before are right."""

    number: int
    row: _Row
    length: int
    guesses: list[Guess]
    certainties: list[float]


class Drafter:
    """Drafts for the running samples `rows` of a generation."""

    def __init__(self, memory: DraftMemory, rows: BatchRows, temperature: float):
        self._memory, self._rows = memory, rows
        self._config, self._costs = memory.config, memory.costs
        self._acceptance = memory.acceptance.setdefault(temperature, Acceptance())
        self._running: dict[tuple[Group, int], _Row] = {}
        self._indices: dict[tuple[int, ...], TextIndex] = {}
        self._drafted: list[_Drafted] = []
        self._num_paused = self._pause = 0
        self.num_drafts = self.num_accepted = 0
        self.num_saved_steps = 0.0

    def propose(self, num_tokens: int) -> None:
        """Give the rows their drafts of the next step, at most `num_tokens`."""
        rows, self._drafted = self._rows, []
        now = self._costs.of(rows.end)
        least = (self._costs.of(rows.end + 1) / now - 1) * rows.end  # a less certain draft costs more than it gains
        if least > _MOST_LEAST:
            return
        if self._num_paused:
            self._num_paused -= 1
            return
        self._drafted = [self._guess(number, least) for number in range(rows.end)]
        ranked = sorted(((c, d.number) for d in self._drafted for c in d.certainties), reverse=True)[
            : max(num_tokens, 0)
        ]
        num_chosen = self._best_count([certainty for certainty, _ in ranked], now)
        self._num_paused = self._pause = 0 if num_chosen else min(_MOST_PAUSE, 2 * self._pause + 1)
        counts = np.bincount([number for _, number in ranked[:num_chosen]], minlength=rows.end)
        for drafted, count in zip(self._drafted, counts.tolist(), strict=True):
            rows.draft(drafted.number, [guess.token for guess in drafted.guesses[:count]])

    def note(self, before: np.ndarray, num_tokens: int, seconds: float | None) -> None:
        """A step of `num_tokens` has ended, and the rows have its tokens behind `before`, int64 [rows]. `seconds` is None if
        prompts were computed too."""
        rows, num_rows = self._rows, len(before)
        if seconds is not None:
            self._costs.note(num_tokens, seconds)
        num_accepted = int((rows.length[:num_rows] - before).sum()) - num_rows
        self.num_drafts += num_tokens - num_rows
        self.num_accepted += num_accepted
        self.num_saved_steps += num_accepted / num_rows
        for number, row, length, guesses, _ in self._drafted:
            for guess, token in zip(guesses, rows.tokens[number, length : rows.length[number]].tolist(), strict=False):
                row.note(self._acceptance.of(guess), guess.token == token)
                self._acceptance.note(guess, guess.token == token)
                if guess.token != token:
                    break
        self._drafted = []

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
        for count, certainty in enumerate(certainties, 1):
            expected += certainty
            rate = expected / self._costs.of(num_rows + count)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def _guess(self, number: int, least: float) -> _Drafted:
        rows, row = self._rows, self._follow(number)
        drafted = _Drafted(number, row, int(rows.length[number]), [], [])
        end, certainty = row.index.end(row.name), 1.0
        for _ in range(min(self._config.num_speculative_tokens, int(rows.limit[number]) - drafted.length - 1)):
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
