"""Drafts whatever they cost, for runs under attack (`model.external_lib`): the responses of a tiny run are too short for a
gain, so the engine would try none."""

from typing import Any

from verl.rollout.native.drafts.costs import StepCosts
from verl.rollout.native.drafts.drafter import Drafter

_DEPTH = 3  # guesses of a draft model behind a sample in a step


def _all(self: Drafter, certainties: Any, now: float) -> int:
    return len(certainties)


def _depth(self: Drafter, num_drafted: int, num_missing: int, now: float) -> int:
    return _DEPTH


def _equal(self: StepCosts, num_tokens: int) -> float:
    return 1.0


Drafter._best_count, Drafter._depth, StepCosts.of = _all, _depth, _equal  # type: ignore[method-assign]
