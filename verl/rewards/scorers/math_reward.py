r"""Answers in \boxed{}: MATH (Hendrycks et al. 2021), Numina, Geometry3K; compared by math-verify."""

from __future__ import annotations

from typing import Any

from verl.rewards.scorers.api import Scorer
from verl.rewards.scorers.equivalence import last_boxed, load_math_verify, math_equal


def compute_score(solution_str: str, ground_truth: Any, **_other: Any) -> float:
    r"""1 when the last \boxed{} of the reply equals the reference (which may be a list of accepted answers, each
    boxed or not), else 0; also 0 without a box."""
    answer = last_boxed(solution_str)
    if not answer:
        return 0.0
    accepted = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    return float(any(math_equal(last_boxed(str(gold)) or str(gold), answer) for gold in accepted))


def _reference(ground_truth: Any, extra_info: dict[str, Any]) -> str:
    gold = str(ground_truth[0] if isinstance(ground_truth, list) else ground_truth)
    return f"\\boxed{{{last_boxed(gold) or gold}}}"


SCORER = Scorer(compute_score, _reference, load_math_verify)
