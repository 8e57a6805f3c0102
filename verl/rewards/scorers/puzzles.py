"""Scorers of two puzzles that forks of 2025 train on: countdown (TinyZero), and knights and knaves (Logic-RL)."""

import ast
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, TypeAlias

from verl.errors import DataError
from verl.foreign_text import quoted
from verl.rewards.scorers.exact_match import last_answer
from verl.rewards.scorers.route import Scorer

Truth: TypeAlias = Any  # the reference answer, which the checks below have read
_MAX_EQUATION = 1000  # characters
_MAX_DIGITS = 18  # of a number in an equation
_OPERATIONS: dict[type, Any] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}


def equation_value(equation: str) -> tuple[Fraction, list[int]] | None:
    """(value, numbers in their order) of an equation of whole numbers with + - * / and parentheses; None for another text."""
    if len(equation) > _MAX_EQUATION or not re.fullmatch(r"[\d+\-*/().\s]+", equation):
        return None
    numbers: list[int] = []

    def evaluate(node: ast.expr) -> Fraction:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](evaluate(node.left), evaluate(node.right))  # type: ignore[no-any-return]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -evaluate(node.operand)
        if isinstance(node, ast.Constant) and type(node.value) is int and len(str(node.value)) <= _MAX_DIGITS:
            numbers.append(node.value)
            return Fraction(node.value)
        raise ValueError(f"{ast.dump(node)} is no part of an equation")

    try:
        return evaluate(ast.parse(equation.strip(), mode="eval").body), numbers
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def countdown(
    solution_str: str, ground_truth: Truth, format_score: float = 0.1, score: float = 1.0, **_other: object
) -> float:
    """`score` for <answer>equation</answer> with each number of ground_truth {"target", "numbers"} once and the target as its
    value, `format_score` for another answer, 0 without the tags."""
    answer = last_answer(solution_str)
    if answer is None:
        return 0.0
    value = equation_value(answer.partition("=")[0])
    target, numbers = _target_and_numbers(ground_truth)
    is_right = value is not None and sorted(value[1]) == sorted(numbers) and value[0] == target
    return score if is_right else format_score


_ROLE = re.compile(r"\b([A-Z][a-z]+)\s+(?i:is\s+(?:an?\s+)?(knight|knave))\b")
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def knights(
    solution_str: str, ground_truth: Truth, format_reward: float = 1.0, answer_reward: float = 2.0, **_other: object
) -> float:
    """The sum of `format_reward`, with a minus unless the tags <think></think><answer></answer> stand once and in order, and of
    the answer: `answer_reward` if each person has the role of ground_truth {"solution_text_format"}, -1.5 for another
    role, -2 for an answer that cannot be read or behind a wrong format. (Logic-RL, arXiv:2502.14768, section 2.2.)"""
    text = solution_str if "<think>" in solution_str else f"<think>{solution_str}"  # the prompt may begin the thoughts
    places = [text.find(tag) for tag in _TAGS]
    if any(text.count(tag) != 1 for tag in _TAGS) or places != sorted(places):
        return -abs(format_reward) - 2.0
    expected, roles = _roles(str(ground_truth["solution_text_format"])), _roles(last_answer(text) or "")
    if not roles.keys() >= expected.keys():
        return format_reward - 2.0
    is_right = all(roles[person] == role for person, role in expected.items())
    return format_reward + (answer_reward if is_right else -1.5)


def _roles(text: str) -> dict[str, str]:
    return {person: role.lower() for person, role in _ROLE.findall(text)}


def _no_reference(ground_truth: object, extra_info: dict[str, object]) -> None:
    """Rows of countdown have no equation, and the best score of knights and knaves is 3."""


def _target_and_numbers(ground_truth: Truth) -> tuple[Fraction, list[Fraction]]:
    return Fraction(str(ground_truth["target"])), [Fraction(str(number)) for number in ground_truth["numbers"]]


def _check_countdown(ground_truth: Truth) -> None:
    try:
        target, numbers = _target_and_numbers(ground_truth)
    except (TypeError, KeyError, ValueError) as error:
        raise DataError(
            f'countdown reads {{"target": 24, "numbers": [4, 6]}}, not {quoted(ground_truth, 80)}.'
        ) from error
    if not numbers:
        raise DataError(f"countdown has no numbers for the target {target}.")


def _check_knights(ground_truth: Truth) -> None:
    text = ground_truth.get("solution_text_format") if isinstance(ground_truth, Mapping) else None
    if not isinstance(text, str) or not _roles(text):
        form = '{"solution_text_format": "(1) Zoey is a knight"}'
        raise DataError(f"Knights and knaves read {form}, not {quoted(ground_truth, 80)}.")


COUNTDOWN = Scorer(countdown, _no_reference, check=_check_countdown)
KNIGHTS = Scorer(knights, _no_reference, check=_check_knights)
