"""Reward functions for runs with a reward model and no function of the user's: they return the model's output.

A user's function gets the same argument by name, and combines rule and model as it likes:

    def compute_score(data_source, solution_str, ground_truth, extra_info=None, reward_model_score=0.0):
        return {"score": reward_model_score + float(ground_truth in solution_str), "model": reward_model_score}

A judge's function gets `reward_model_reply`, the text that the judge wrote, and parses it.
"""

import math
import re
from typing import Any

_NUMBER = re.compile(r"((?:(?<!\d)-)?\d+(?:\.\d+)?)(?:[\s*_`(]*(?:/|out of|of)[\s*_`]*\d+(?:\.\d+)?)?")
_PART = re.compile(r"^(judge/\w+): (-?\d+(?:\.\d+)?)$", re.MULTILINE)


def model_score(*, reward_model_score: float, **_: object) -> dict[str, object]:
    return {"score": reward_model_score}


def model_scores(*, reward_model_scores: list[float], **_: object) -> list[dict[str, object]]:
    """`model_score` for the manager `batch`."""
    return [{"score": score} for score in reward_model_scores]


def last_number(*, reward_model_reply: str, **_: object) -> dict[str, Any]:
    """The last number of the judge's reply ("I give it 7 of 10. Score: 7" is 7). Lines `judge/NAME: number`, which a rubric or
    a comparison has, are parts of the score. Raises ValueError without a number."""
    result = _score_of(reward_model_reply)
    if math.isnan(result["score"]):
        raise ValueError(f"the judge's reply has no number: {reward_model_reply[:80]!r}")
    return result


def last_numbers(*, reward_model_replies: list[str], **_: object) -> list[dict[str, object]]:
    """`last_number` for the manager `batch`; a reply without a number gets NaN and costs only its own sample."""
    return [_score_of(reply) for reply in reward_model_replies]


def _score_of(reply: str) -> dict[str, Any]:
    parts = {name: float(value) for name, value in _PART.findall(reply)}
    return {"score": math.nan if reply.endswith("Score: nan") else grade_of(reply), "reply": reply, **parts}


def grade_of(reply: str) -> float:
    """The last number of a judge's reply: 8 of "8/10" and of "7 to 8 out of 10"; NaN without one."""
    numbers = _NUMBER.findall(reply)
    number = float(numbers[-1]) if numbers else math.nan
    return number if math.isfinite(number) else math.nan
