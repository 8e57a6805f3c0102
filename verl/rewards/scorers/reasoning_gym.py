"""Scorer of reasoning-gym tasks (Stojanovski et al. 2025, arXiv:2505.24760), without partial credit.

A task's own scorer gives credit when the reference merely occurs in the reply. It therefore gets an extracted answer, and
only its full score counts. It may hang on a reply such as `9**9**9**9**9`: the worker's time limit ends that.
"""

import functools
import importlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from verl.errors import RewardError, install_command
from verl.rewards.scorers.exact_match import last_answer, same_number
from verl.rewards.scorers.route import Scorer

PREFIX = "reasoning_gym/"
_NUMBER = re.compile(r"(?:(?<![\w)])-)?\d+(?:,\d{3})*(?:\.\d+)?")
_TUPLE_TASKS = ("arc_agi", "rearc")  # their scorers compare grids as tuples; JSON has turned these into lists


def extract_answer(reply: str, reference: str | None) -> str:
    """Text of the last <answer>...</answer>, else the reply; of that the last number when the reference is a number.

    Numbers have no thousands separators. A number that equals the reference is spelled like it; "" when there is no number.
    """
    answer = last_answer(reply)
    text = reply.strip() if answer is None else answer
    if reference is None or not _NUMBER.fullmatch(reference.strip().lstrip("$").rstrip(".")):
        return text
    numbers = _NUMBER.findall(text)
    if not numbers:
        return ""
    return reference.strip() if same_number(numbers[-1], reference) else str(numbers[-1]).replace(",", "")


def compute_score(
    solution_str: str,
    ground_truth: object,
    extra_info: Mapping[str, object] | None = None,
    data_source: str = "",
    **_other: object,
) -> float:
    """1 when the task's scorer gives exactly 1 to the extracted answer, else 0.

    `extra_info` holds question, answer, metadata (a dict or JSON text) and task, as reasoning-gym made them; a task not
    named there is taken from the data_source. Raises RewardError for an unknown task.
    """
    extra: Mapping[str, Any] = extra_info or {}
    metadata = extra.get("metadata") or {}
    metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    task = str(extra.get("task") or data_source.removeprefix(PREFIX))
    if task in _TUPLE_TASKS:
        metadata = _as_tuples(metadata)
    item = {"question": extra.get("question", ""), "answer": extra.get("answer", ground_truth), "metadata": metadata}
    score_answer = task_scorer(task)
    answer = extract_answer(solution_str, item["answer"])
    try:
        return float(score_answer(answer, item) == 1)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - several scorers raise on replies that do not parse: a wrong answer, not an error
        return 0.0


@functools.cache
def task_scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    """`score_answer(answer, item)` of a task. Raises RewardError when the task or the package does not exist."""
    try:
        from reasoning_gym.factory import DATASETS, get_score_answer_fn
    except ImportError as error:
        raise RewardError(
            "Scoring reasoning_gym rows needs the package 'reasoning-gym', which is not installed. "
            f"Install it with: {install_command('reasoning-gym', 'reasoning-gym')}"
        ) from error
    if task not in DATASETS:
        raise RewardError(f"reasoning-gym has no task {task!r}; data_source is {PREFIX}<task>.")
    return get_score_answer_fn(task)  # type: ignore[no-any-return]


def _as_tuples(value: object) -> Any:
    if isinstance(value, dict):
        return {k: _as_tuples(v) for k, v in value.items()}
    return tuple(_as_tuples(v) for v in value) if isinstance(value, list) else value


def _reference(ground_truth: object, extra_info: dict[str, object]) -> str | None:
    answer = extra_info.get("answer", ground_truth)
    return None if answer is None else str(answer)


SCORER = Scorer(compute_score, _reference, lambda: importlib.import_module("reasoning_gym"))
