r"""Counting letters (verl/data/tasks/char_count.py): the last \boxed{} of the reply equals the count."""

from __future__ import annotations

from verl.rewards.scorers.exact_match import same_number
from verl.rewards.scorers.math_answers import last_boxed
from verl.rewards.scorers.route import Scorer


def compute_score(solution_str: str, ground_truth: object, **_other: object) -> float:
    r"""1 when the last \boxed{} of the reply is the reference count, else 0."""
    return float(same_number(last_boxed(solution_str) or "", str(ground_truth)))


def _reference(ground_truth: object, extra_info: dict[str, object]) -> str:
    return f"\\boxed{{{ground_truth}}}"


SCORER = Scorer(compute_score, _reference)
