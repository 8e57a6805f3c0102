"""Programs as answers: they need a sandbox to run in, which this version does not have yet."""

from __future__ import annotations

from typing import Any

from verl.errors import RewardError
from verl.rewards.scorers.api import Scorer

_SENTENCE = (
    "Rewards that run the model's code (codecontests, apps, codeforces, taco) need a sandbox, which this version does "
    "not have; set custom_reward_function.path to a function of your own."
)


def compute_score(**_sample: Any) -> float:
    raise RewardError(_SENTENCE)


def _reference(ground_truth: Any, extra_info: dict[str, Any]) -> None:
    return None


def _refuse() -> None:
    raise RewardError(_SENTENCE)


SCORER = Scorer(compute_score, _reference, _refuse)  # refusing when warmed means: before the run
