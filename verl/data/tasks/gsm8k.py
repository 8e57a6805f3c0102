"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168), grade-school word problems, in the row schema of verl."""

import re
from pathlib import Path
from typing import Any

from verl.data.files import read_rows, write_parquet
from verl.errors import DataError

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
_FINAL = re.compile(r"####\s*(-?[0-9.,]+)")


def row_of(problem: dict[str, Any], split: str, index: int, place: str) -> dict[str, object]:
    """One row of the schema; raises DataError when question or answer is missing or the answer has no "#### number"."""
    for name in ("question", "answer"):
        if not isinstance(problem.get(name), str):
            raise DataError(f"{place}: field {name!r} must be a text; a GSM8K problem has question and answer.")
    final = _FINAL.search(problem["answer"])
    if final is None:
        raise DataError(f"{place}: field 'answer' has no final line '#### number'.")
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{problem['question']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": final.group(1).replace(",", "")},
        "extra_info": {"split": split, "index": index, "answer": problem["answer"], "question": problem["question"]},
    }


def prepare(source: Path, output: Path) -> list[str]:
    """`source`/{train,test}.jsonl to `output`/{train,test}.parquet; returns a sentence for each file."""
    lines = []
    for split in ("train", "test"):
        problems = read_rows(source / f"{split}.jsonl")
        rows = [row_of(problems[i], split, i, problems.place(i)) for i in range(len(problems))]
        write_parquet(output / f"{split}.parquet", rows)
        lines.append(f"{output / f'{split}.parquet'}: {len(rows)} rows")
    return lines
