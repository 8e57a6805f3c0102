"""Measured costs of drafts, and their share of right guesses. They decide how many drafts are tried, and no sample."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from verl.config.sections.rollout import RolloutConfig, SpeculativeConfig
from verl.data_proto.tokenizer import Tokenizer
from verl.models.hf_module import HFModule
from verl.rollout.native.compiled.forward import CpuForward
from verl.rollout.native.drafts.head import DraftHead
from verl.rollout.native.drafts.model import DraftFollower, draft_model
from verl.rollout.native.drafts.texts import MOST_MATCHED, OF_MODEL, Guess, History

_BOUND_ROWS = 8  # rows up to which a step on a CPU takes the time of reading the weights
_FADES = 256  # steps after which half of a measured time is forgotten
_NEWEST = 0.1  # least weight of the newest time of a step
_OUTLIER = 3.0  # times the expected time of a step
_MOST_TRIALS = 400  # of a kind of guess, before older ones count half
_FIRST_LOSS = 4.0  # steps whose time drafts may lose at first
_LOSS = 0.01  # share of the time of later steps that drafts may lose
_MOST_LOSS = 128.0  # steps; drafts that gain time do not allow more


class StepCosts:
    """Seconds of a step by its number of tokens, as a factor of `_shape`. Sizes within a fifth of each other share a factor;
    others have the nearest one. Old factors fade to the newest."""

    def __init__(self) -> None:
        self._factors: dict[int, tuple[float, int, int]] = {}  # measurements, number of the newest step
        self._newest, self.num_steps = 1.0, 0

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step of `num_tokens` took so long."""
        size, factor = _size(num_tokens), seconds / _shape(num_tokens)
        _, count, _ = self._factors.get(size, (0.0, 0, 0))
        if self.num_steps:
            expected = self.of(num_tokens) / _shape(num_tokens)
            factor = min(factor, _OUTLIER * expected)
            if count:
                factor = expected + max(_NEWEST, 1 / (count + 1)) * (factor - expected)
        self.num_steps, self._newest = self.num_steps + 1, factor
        self._factors[size] = factor, count + 1, self.num_steps

    def of(self, num_tokens: int) -> float:
        """Expected seconds; in any unit before the first measurement."""
        size = _size(num_tokens)
        if size not in self._factors and self._factors:
            size = min(self._factors, key=lambda measured: abs(measured - size))
        factor, _, at = self._factors.get(size, (self._newest, 0, self.num_steps))
        weight = math.pow(0.5, (self.num_steps - at) / _FADES)
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
        is_model = guess.matched == OF_MODEL
        kind = min(guess.matched, MOST_MATCHED) // 2, round((8 if is_model else 4) * guess.share)
        if kind not in self._counts:  # about what was measured at temperatures 0.6 and 1
            share = 0.8 if is_model else 0.35 + 0.03 * guess.matched
            self._counts[kind] = [3 * guess.share * share, 3.0]
        return self._counts[kind]

    def of_model(self) -> float:
        """The share of a draft model's guesses."""
        counts = [[2.0, 3.0], *(counts for (matched, _), counts in self._counts.items() if matched < 0)]
        right, trials = np.sum(counts, axis=0)
        return float(right / trials)


@dataclass(eq=False)
class DraftMemory:
    """Times of steps, acceptance by temperature and earlier responses, which outlive a generation. They only decide how many
    drafts are tried.

    Drafts may lose `budget_s` seconds. Each step adds 1% of its time and what its drafts have gained, and takes what they have
    cost. So by the measured costs, a run with drafts is at most 1% slower than one without.
    """

    config: SpeculativeConfig
    model: DraftFollower | None = None
    costs: StepCosts = field(default_factory=StepCosts)
    model_costs: StepCosts = field(default_factory=StepCosts)  # of a forward of the draft model
    acceptance: dict[float, Acceptance] = field(default_factory=dict)
    budget_s: float | None = None
    num_without_model: int = 0  # steps since its last guess
    history: History = field(init=False)

    @classmethod
    def of(cls, policy: HFModule, tokenizer: Tokenizer | None, config: RolloutConfig) -> DraftMemory:
        """The memory for drafts of `policy` by these keys, with what guesses; see DraftHead and draft_model for errors."""
        is_head = "mtp" in config.speculative.methods
        return cls(config.speculative, DraftHead(policy) if is_head else draft_model(policy, tokenizer, config))

    def open(self, policy: CpuForward) -> None:
        """A generation of `policy` begins."""
        if self.model is not None:
            self.model.open(policy)

    def __post_init__(self) -> None:
        self.history = History(self.config.history_mb << 20 if "history" in self.config.methods else 0)

    def may_lose(self, plain_s: float) -> float:
        """Seconds that drafts of a step may lose; it takes `plain_s` without."""
        return _FIRST_LOSS * plain_s if self.budget_s is None else self.budget_s

    def account(self, num_rows: int, num_tokens: int, step_s: float, model_s: float, num_accepted: int) -> None:
        """A step of `num_tokens` of `num_rows` took `step_s`, and the draft model `model_s`."""
        plain_s, spent_s = self.costs.of(num_rows), model_s
        if num_tokens > num_rows:
            spent_s += min(step_s, _OUTLIER * self.costs.of(num_tokens)) - plain_s
        budget_s = self.may_lose(plain_s) + _LOSS * plain_s + num_accepted / num_rows * plain_s - spent_s
        self.budget_s = min(budget_s, max(_MOST_LOSS * plain_s, self.may_lose(plain_s)))

    def model_cost(self, num_tokens: int) -> float:
        """Expected seconds of a forward of the draft model."""
        if self.model is not None and not self.model_costs.num_steps:  # as weights are read
            return self.model.share * self.costs.of(num_tokens)
        return self.model_costs.of(num_tokens)
