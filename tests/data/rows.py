"""Rows and configs that the tests of this folder share."""

import json
from dataclasses import replace

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
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def config(**changes):
    return replace(DataConfig(), **{"max_prompt_length": 64, "shuffle": False, **changes})
