"""Results of a reward function: each becomes a score with parts that every later step can use, or the reason why not.

The worker checks the function's results, so that one sample of a batch costs no other. The run checks the results from the
worker again.
"""

import math
from collections.abc import Iterator
from typing import Any

from verl.foreign_text import clean, valid_utf8
from verl.parallel.framing import encode_frame
from verl.rewards.sandbox.limits import KIB, Limits

Outcome = dict[str, Any]  # {"score": float, "parts": dict} or {"error": str}, such as "took longer than 30 s"

MAX_DEPTH = 8  # of lists and dicts inside a part
_MAX_NAME, _MAX_ERROR = 100, 1000  # characters
_CONTAINERS = (dict, list, tuple, set, frozenset)


class RefusedResult(Exception):
    """Completes "the reward function ..."."""


def outcome(result: object, limits: Limits) -> Outcome:
    """The result of a reward function as {"score", "parts"} or {"error"}. A number or bool is its own part "acc"; of a dict the
    entry "score" is the score and every further entry is a part."""
    try:
        if not isinstance(result, dict):
            score = _score(result, limits)
            return {"score": score, "parts": {"acc": score}}
        num_parts = len(result) - ("score" in result)
        if num_parts > limits.max_parts:  # before anything is copied
            raise RefusedResult(
                f"returned a dict with {num_parts} parts; reward.max_parts={limits.max_parts} are allowed"
            )
        if "score" not in result:
            raise RefusedResult(f"returned a dict without 'score' (it has {sorted(map(str, result))})")
        parts = {k: v for k, v in result.items() if not (isinstance(k, str) and k == "score")}
        return {"score": _score(result["score"], limits), "parts": dict(_entries(parts, limits, MAX_DEPTH))}
    except RefusedResult as refused:
        return {"error": clean(refused, _MAX_ERROR)}


def checked_outcome(answer: object, limits: Limits) -> Outcome | None:
    """The outcome that a worker sent, checked once more; None for something that no worker of ours sends."""
    if not isinstance(answer, dict):
        return None
    if "error" in answer:
        return {"error": clean(answer["error"], _MAX_ERROR)} if isinstance(answer["error"], str) else None
    if not isinstance(answer.get("score"), float) or not isinstance(answer.get("parts"), dict):
        return None
    return outcome({**answer["parts"], "score": answer["score"]}, limits)


def within_size(answer: Outcome, limits: Limits) -> Outcome:
    """The outcome, or an error if its JSON has more than `limits.max_result_kb`."""
    return {"error": _too_large(limits)} if len(encode_frame(answer)) > limits.max_result_kb * KIB else answer


def _too_large(limits: Limits) -> str:
    return f"returned more than reward.max_result_kb={limits.max_result_kb} allows for a sample"


def _score(value: object, limits: Limits) -> float:
    plain = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(plain, (bool, int, float)):
        kind = "None" if value is None else f"a {type(value).__name__}"
        raise RefusedResult(f"returned {kind} where a number is needed")
    return float(checked_number(plain, "score", limits))


def checked_number(value: float, name: str, limits: Limits) -> float:
    """The number. Raises RefusedResult unless it is finite and within `limits.max_abs_score`."""
    if isinstance(value, float) and not math.isfinite(value):
        raise RefusedResult(f"returned {value} as {name!r}, which is not a finite number")
    if abs(value) > limits.max_abs_score:
        raise RefusedResult(
            f"returned a number beyond reward.max_abs_score={limits.max_abs_score:g} as {name!r}, too large for the "
            "statistics of its group"
        )
    return value


def _entries(mapping: dict[object, object], limits: Limits, depth: int) -> Iterator[tuple[str, object]]:
    for key, value in mapping.items():
        name = clean(key, _MAX_NAME)
        yield name, _part(value, name, limits, depth)


def _part(value: object, name: str, limits: Limits, depth: int) -> object:
    """The plain form of a value: of numpy's and of torch's, of sets and tuples; text as valid UTF-8."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (str, *_CONTAINERS)) and len(value) > limits.max_result_kb * KIB:
        raise RefusedResult(_too_large(limits))  # before anything is copied
    if isinstance(value, str):
        return valid_utf8(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return checked_number(value, name, limits)
    if isinstance(value, _CONTAINERS):
        if depth == 0:
            raise RefusedResult(
                f"returned a dict whose {name!r} has more than {MAX_DEPTH} lists or dicts inside each other"
            )
        if isinstance(value, dict):
            return dict(_entries(value, limits, depth - 1))
        return [_part(element, name, limits, depth - 1) for element in value]
    kind = type(value).__name__
    raise RefusedResult(f"returned a dict whose {name!r} has a {kind}: parts are numbers, text, lists and dicts")
