"""Scorer of GSM8K (Cobbe et al. 2021, arXiv:2110.14168): the number after "####" must be the reference number."""

from __future__ import annotations

import re
from typing import Literal

from verl.rewards.scorers.exact_match import same_number
from verl.rewards.scorers.route import Scorer

LEGACY_WINDOW = 300  # characters at the end of a reply in which existing releases look for the answer
_MARKED = re.compile(r"#### (-?\$?[0-9.,]+)")
_ANY = re.compile(r"-?\$?[0-9.,]+")


def extract_solution(
    solution_str: str, method: Literal["strict", "flexible"] = "strict", legacy: bool = False
) -> str | None:
    """The final number as text without thousands separators; None without one.

    "strict": the last one after "#### "; "flexible": the last number of the text. `legacy`: only among the last 300 characters.
    """
    pattern = _MARKED if method == "strict" else _ANY
    numbers = pattern.findall(solution_str[-LEGACY_WINDOW:] if legacy else solution_str)
    return next((_plain(n) for n in reversed(numbers) if any(c.isdigit() for c in n)), None)


def compute_score(
    solution_str: str,
    ground_truth: object,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
    legacy: bool = False,
    **_other: object,
) -> float:
    """`score` when the extracted number equals the reference, `format_score` for another number, 0 without one. `legacy`: the
    rule of existing releases, which compare the numbers as text and see the last 300 characters of the reply only."""
    answer = extract_solution(solution_str, method, legacy)
    if answer is None:
        return 0.0
    reference = _plain(str(ground_truth).strip())
    return score if answer == reference or (not legacy and same_number(answer, reference)) else format_score


def _plain(number: str) -> str:
    return number.replace(",", "").replace("$", "").rstrip(".")


SCORER = Scorer(compute_score, lambda ground_truth, extra_info: f"#### {ground_truth}")
