"""Scorer of GSM8K (Cobbe et al. 2021, arXiv:2110.14168): the number after "####" must be the reference number."""

from __future__ import annotations

import re
from typing import Any, Literal

from verl.rewards.scorers.route import Scorer

NUM_LAST_CHARACTERS = 300  # that are searched for the answer; also bounds the time of the regular expressions
_MARKED = re.compile(r"#### (\-?[0-9\.\,]+)")
_ANY = re.compile(r"\-?[0-9\.\,]+")


def extract_solution(solution_str: str, method: Literal["strict", "flexible"] = "strict") -> str | None:
    """The final number as text without thousands separators, from the last 300 characters; None without one.

    "strict": the last one after "#### "; "flexible": the last number of the text.
    """
    pattern = _MARKED if method == "strict" else _ANY
    numbers = [_without_separators(n) for n in pattern.findall(solution_str[-NUM_LAST_CHARACTERS:])]
    if method == "flexible":
        numbers = [n.rstrip(".") for n in numbers if any(c.isdigit() for c in n)]
    return numbers[-1] if numbers else None


def compute_score(
    solution_str: str,
    ground_truth: Any,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
    **_other: Any,
) -> float:
    """`score` when the extracted number is the reference's text, `format_score` for another number, 0 without one."""
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if answer == _without_separators(str(ground_truth).strip()) else format_score


def _without_separators(number: str) -> str:
    return number.replace(",", "").replace("$", "")


SCORER = Scorer(compute_score, lambda ground_truth, extra_info: f"#### {ground_truth}")
