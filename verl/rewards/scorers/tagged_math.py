"""Answers of mathematics and multiple choice in <think>...</think> <answer>...</answer> (the reward of Open-R1-Multimodal)."""

from __future__ import annotations

import re
from typing import Any

from verl.rewards.scorers.equivalence import last_boxed, math_equal
from verl.rewards.scorers.exact_match import last_answer

_FORM = re.compile(r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*", re.DOTALL)


def compute_score(solution_str: str, ground_truth: Any, format_weight: float = 0.1, **_other: Any) -> dict[str, Any]:
    """{"score": (1 - format_weight) accuracy + format_weight format, "acc", "format"}: accuracy is 1 when the text of <answer>
    (or of the box in it) equals the reference as text or as mathematics, format is 1 for a reply of just the two tags."""
    gold = last_answer(str(ground_truth)) or str(ground_truth)
    answer = last_answer(solution_str)
    correct = False
    if answer:
        answer, gold = last_boxed(answer) or answer, last_boxed(gold) or gold
        correct = answer.strip() == gold.strip() or math_equal(gold, answer)
    form = float(_FORM.fullmatch(solution_str) is not None)
    return {"score": (1 - format_weight) * correct + format_weight * form, "acc": correct, "format": form}
