"""Scorer of tool calls against reference calls (ToolRL, Qian et al. 2025, arXiv:2504.13958, section 3.3).

Reply and reference have <think>, and <tool_call> (one JSON object {"name", "parameters"} a line) or <response>.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

_CALLS = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_MAX_MATCHED = 6  # calls of a reply that are matched in every order; more are matched in their own order

Call = dict[str, Any]


def compute_score(solution_str: str, ground_truth: object, **_other: object) -> dict[str, Any]:
    """{"score": sum of both, "format_reward": 0 or 1, "accuracy_reward": -3 to 3}. Scripts of GDPO name them."""
    reference = str(ground_truth)
    form, correct = format_score(solution_str, reference), correctness(solution_str, reference)
    return {"score": form + correct, "format_reward": form, "accuracy_reward": correct}


def format_score(reply: str, reference: str) -> float:
    """1 when the reply is <think> followed by the parts of the reference, each once and in that order, else 0."""
    parts = ["think", *(name for name in ("tool_call", "response") if f"<{name}>" in reference)]
    pattern = r"\s*".join(rf"<{name}>.*?</{name}>" for name in parts)
    once = all(
        reply.count(f"<{n}>") == reply.count(f"</{n}>") == (n in parts) for n in ("think", "tool_call", "response")
    )
    return float(once and re.fullmatch(rf"\s*{pattern}\s*", reply, re.DOTALL) is not None)


def correctness(reply: str, reference: str) -> float:
    """6 R / S - 3. R counts names, parameter names and values that agree under the best matching of calls, S is its
    maximum. A reference without calls is matched by a reply without calls."""
    expected = calls_of(reference)
    calls = calls_of(reply)
    if expected is None or calls is None:
        return -3.0
    if not expected:
        return 3.0 if not calls else -3.0
    names = _overlap(Counter(c["name"] for c in expected), Counter(c["name"] for c in calls))
    maximum = 1 + len(expected) + sum(len(call["parameters"]) for call in expected)
    return 6 * (names + _best_matching(expected, calls)) / maximum - 3


def calls_of(text: str) -> list[Call] | None:
    """Calls of a text; [] without <tool_call>, None when one is not JSON with a name and parameters."""
    block = _CALLS.search(text)
    calls = []
    for line in block[1].splitlines() if block else ():
        if not line.strip():
            continue
        try:
            call = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not (isinstance(call, dict) and isinstance(call.get("name"), str)):
            return None
        if not isinstance(call.setdefault("parameters", {}), dict):
            return None
        calls.append(call)
    return calls


def _best_matching(expected: Sequence[Call], calls: Sequence[Call]) -> float:
    gains = [[_gain(want, call) for call in calls] for want in expected]
    if max(len(expected), len(calls)) > _MAX_MATCHED:
        return sum(gains[i][i] for i in range(min(len(expected), len(calls))))
    width = max(len(expected), len(calls))
    square = [[row[j] if j < len(row) else 0.0 for j in range(width)] for row in gains]
    return max(
        sum(row[j] for row, j in zip(square, order, strict=False)) for order in itertools.permutations(range(width))
    )


def _gain(want: Call, call: Call) -> float:
    """Number of parameter names and values that agree; 0 for a call of another tool."""
    if want["name"] != call["name"]:
        return 0.0
    expected, parameters = want["parameters"], call["parameters"]
    values = sum(key in parameters and parameters[key] == value for key, value in expected.items())
    return _overlap(Counter(expected.keys()), Counter(parameters.keys())) + float(values)


def _overlap(one: Counter[str], other: Counter[str]) -> float:
    """Intersection over union of two bags of names."""
    union = (one | other).total()
    return (one & other).total() / union if union else 1.0
