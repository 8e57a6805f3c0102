"""DAPO's mathematics (Yu et al. 2025, arXiv:2503.14476) and AIME: the reply ends in "Answer: X"; the score is 1 or
-1."""

from __future__ import annotations

import re
from typing import Any

from verl.rewards.scorers.api import Scorer
from verl.rewards.scorers.equivalence import last_boxed, load_math_verify, math_equal

NUM_LAST_CHARACTERS = 300
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)


def compute_score(solution_str: str, ground_truth: Any, **_other: Any) -> dict[str, Any]:
    """{"score": 1.0 or -1.0, "acc": bool, "pred": the text after the last "Answer:" among the last 300 characters}."""
    found = _ANSWER.findall(solution_str[-NUM_LAST_CHARACTERS:])
    answer = _plain(found[-1]) if found else ""
    correct = bool(answer) and math_equal(_plain(str(ground_truth)), answer)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": answer or "[none]"}


def _plain(answer: str) -> str:
    answer = last_boxed(answer) or answer
    return answer.strip().strip("*$").rstrip(".").strip("$ ")


def _reference(ground_truth: Any, extra_info: dict[str, Any]) -> str:
    return f"Answer: {ground_truth}"


SCORER = Scorer(compute_score, _reference, load_math_verify)
