"""Rows and configs that the tests of this folder share."""

from dataclasses import replace

from tests.json_lines import write_lines
from verl.config import DataConfig


def row(number=0, **changes):
    values = {
        "data_source": "task/a",
        "prompt": [{"role": "user", "content": f"question {number}"}],
        "reward_model": {"style": "rule", "ground_truth": str(number)},
        "extra_info": {"index": number, "split": "train"},
    }
    values.update(changes)
    return {key: value for key, value in values.items() if value is not ...}


def write(path, rows):
    return str(write_lines(path, rows))


def config(**changes):
    return replace(DataConfig(), **{"max_prompt_length": 64, "shuffle": False, **changes})
