"""Mixtures of reasoning-gym tasks (Stojanovski et al. 2025, arXiv:2505.24760), with test questions held out.

A problem is held out in all its wordings and tasks: "What is 2 * 3?" does not train when "Calculate 2 * 3." is tested.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from verl.data.files import write_parquet
from verl.errors import DataError, MissingExtraError, nearest

Item = dict[str, Any]  # question, answer, metadata

# A 135M-parameter model learns these in minutes: it starts near 0.15, and they have 100 to 363 questions each.
DEFAULT_TASKS: dict[str, dict[str, object]] = {
    "basic_arithmetic": {
        "min_terms": 2,
        "max_terms": 2,
        "min_digits": 1,
        "max_digits": 1,
        "operators": ["+", "-", "*"],
        "allow_parentheses": False,
        "allow_negation": False,
    },
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 10},
}
MAX_FAILED_SAMPLES = 3000  # without a new question in a row; then a task counts as exhausted
BLOCK = 1000  # items of a task that are made by one data set
MAX_TEST_SHARE = 1 / 3  # of a task that has too few questions for both parts

PromptStyle = Literal["short", "plain"]
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


@dataclass
class Task:
    """Distinct questions of one task, generated on demand."""

    name: str
    source: Iterator[Item]
    items: list[Item]
    exhausted: bool = False

    @classmethod
    def open(cls, name: str, settings: dict[str, object], seed: int) -> Task:
        """Raises MissingExtraError without reasoning-gym, DataError for an unknown task or settings that it refuses."""
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise MissingExtraError("Preparing reasoning_gym data", "reasoning-gym", "reasoning-gym") from error
        if name not in DATASETS:
            hint = nearest(name, DATASETS) or f"; it has {len(DATASETS)} others"
            raise DataError(f"reasoning-gym has no task {name!r}{hint}")

        def generate() -> Iterator[Item]:
            # item i depends on seed + i, so blocks continue each other; some tasks make `size` items at once
            for start in itertools.count(seed, BLOCK):
                dataset = reasoning_gym.create_dataset(name, size=BLOCK, seed=start, **settings)
                yield from (dataset[i] for i in range(BLOCK))

        try:
            first = next(items := generate())
        except (TypeError, ValueError, AssertionError) as error:
            raise DataError(f"The settings {json.dumps(settings)} do not fit the task {name}: {error}") from error
        return cls(name, itertools.chain([first], items), [])

    def add(self, count: int) -> None:
        """Adds up to `count` questions that are not among `items` yet."""
        questions = {item["question"] for item in self.items}
        target, failed = len(self.items) + count, 0
        while len(self.items) < target:
            item = next(self.source)
            if item["question"] not in questions:
                questions.add(item["question"])
                self.items.append(item)
                failed = 0
                continue
            failed += 1
            if failed == MAX_FAILED_SAMPLES:
                self.exhausted = True
                return


def problem_key(item: Item) -> str:
    """The problem behind any wording: the metadata that define it, else the question itself."""
    metadata = item.get("metadata") or {}
    facts = {k: v for k, v in metadata.items() if k not in ("source_dataset", "source_index", "difficulty")}
    return json.dumps(facts, sort_keys=True, default=str) if facts else item["question"]


def add_mixture(tasks: list[Task], count: int) -> None:
    """Add `count` questions in all, in equal shares; the remaining tasks take over the share of exhausted ones."""
    missing = count
    while missing > 0:
        live = [task for task in tasks if not task.exhausted]
        if not live:
            return
        share, rest = divmod(missing, len(live))
        for number, task in enumerate(live):
            task.add(share + (number < rest))
        missing = count - sum(len(task.items) for task in tasks)


def choose_test(tasks: list[Task], share: float, seed: int) -> dict[str, list[Item]]:
    """About `share` of each task's items, by task: all items of a problem, in an order that `seed` decides."""
    chosen: dict[str, list[Item]] = {}
    num_items = taken = 0
    for task in tasks:
        num_items += len(task.items)
        quota = round(num_items * share) - taken  # rounded on the running total, so that the parts add up
        items = sorted(task.items, key=lambda item: (problem_key(item), item["question"]))
        problems = [list(group) for _, group in itertools.groupby(items, key=problem_key)]
        random.Random(f"{seed} {task.name}").shuffle(problems)
        chosen[task.name] = list(itertools.chain.from_iterable(problems))[:quota]
        taken += quota
    return chosen


def remaining(task: Task, test: dict[str, list[Item]]) -> list[Item]:
    """The items of a task that share neither problem nor question text with any test item."""
    problems = {problem_key(item) for items in test.values() for item in items}
    texts = {item["question"] for items in test.values() for item in items}
    return [item for item in task.items if item["question"] not in texts and problem_key(item) not in problems]


def row_of(item: Item, task: str, split: str, index: int, style: PromptStyle, numeric: bool) -> dict[str, object]:
    """One row of the schema. metadata is JSON text: as a parquet struct each task would get the fields of all tasks."""
    question = item["question"]
    if style == "short":
        question += f"\nGive only the final answer{' as a number' if numeric else ''} and nothing else."
    return {
        "data_source": f"reasoning_gym/{task}",
        "prompt": [{"role": "user", "content": question}],
        "ability": "reasoning",
        "reward_model": {"style": "rule", "ground_truth": str(item["answer"])},
        "extra_info": {
            "split": split,
            "index": index,
            "task": task,
            "question": item["question"],
            "answer": None if item["answer"] is None else str(item["answer"]),
            "metadata": json.dumps(item.get("metadata") or {}, default=str),
        },
    }


def prepare(
    output: Path, tasks: dict[str, dict[str, object]], *, num_train: int, num_test: int, seed: int, style: PromptStyle
) -> list[str]:
    """Write `output`/{train,test}.parquet; returns a sentence for each task and file. The files are a function of the
    arguments (and of PYTHONHASHSEED for the few tasks that iterate over sets). Raises DataError when a part is empty.
    """
    opened = [Task.open(name, settings, seed) for name, settings in tasks.items()]
    test, train = _split(opened, num_train, num_test, seed)
    lines = []
    for task in opened:
        note = ", all that its settings give" if task.exhausted else ""
        counts = f"{len(train[task.name])} train, {len(test[task.name])} test"
        lines.append(f"{task.name}: {len(task.items)} distinct questions{note}; {counts}")
    numeric = {t.name: all(_NUMBER.fullmatch(str(item["answer"])) for item in t.items) for t in opened}
    for split, part in (("train", train), ("test", test)):
        chosen = [(name, item) for name, items in part.items() for item in items]
        if not chosen:
            raise DataError(f"No question is left for {split}.parquet; ask for more rows or give more tasks.")
        random.Random(seed).shuffle(chosen)
        rows = [row_of(item, name, split, i, style, numeric[name]) for i, (name, item) in enumerate(chosen)]
        write_parquet(output / f"{split}.parquet", rows)
        lines.append(f"{output / f'{split}.parquet'}: {len(rows)} rows")
    return lines


def _split(
    tasks: list[Task], num_train: int, num_test: int, seed: int
) -> tuple[dict[str, list[Item]], dict[str, list[Item]]]:
    """(test, train) items by task. Held-out problems leave training in all their wordings, so more questions are added."""
    add_mixture(tasks, num_train + num_test)
    total = sum(len(task.items) for task in tasks)
    share = num_test / (num_train + num_test)
    if total < num_train + num_test:
        share = min(num_test / total, max(share, MAX_TEST_SHARE))
    test = choose_test(tasks, share, seed)
    while True:
        train = {task.name: remaining(task, test) for task in tasks}
        missing = num_train - sum(map(len, train.values()))
        if missing <= 0 or all(task.exhausted for task in tasks):
            return test, _thinned(train, num_train)
        add_mixture(tasks, sum(len(task.items) for task in tasks) + missing)


def _thinned(parts: dict[str, list[Item]], count: int) -> dict[str, list[Item]]:
    """`count` items at most; the ends of the longest parts are removed."""
    thinned = {name: list(items) for name, items in parts.items()}
    for _ in range(sum(map(len, thinned.values())) - count):
        max(thinned.values(), key=len).pop()
    return thinned
