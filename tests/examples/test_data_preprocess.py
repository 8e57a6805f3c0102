"""Preparation scripts in the style of the existing verl: `datasets` to parquet that trains. They need the extra 'scripts'."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.rows import config
from verl.data.dataset import load_dataset
from verl.models.tiny import make_tokenizer
from verl.rewards.scorers.route import default_compute_score

ROOT = Path(__file__).parents[2]
SCRIPTS = {
    "gsm8k": ({"question": "What is 40 + 2?", "answer": "40 + 2 = 42\n#### 42"}, "42", "so\n#### 42"),
    "math_dataset": (
        {"problem": "What is $\\frac{1}{2} + \\frac14$?", "solution": "It is $\\boxed{\\frac{3}{4}}$."},
        "\\frac{3}{4}",
        "thus \\boxed{\\frac{3}{4}}",
    ),
}


def test_there_is_one_row_for_each_script():
    assert {file.stem for file in (ROOT / "examples/data_preprocess").glob("*.py")} == set(SCRIPTS)


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="needs the extra 'scripts' (datasets)")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_preparation_script_makes_rows_that_train(name, tmp_path):
    row, truth, answer = SCRIPTS[name]
    for split, number in (("train", 5), ("test", 2)):
        (tmp_path / f"{split}.jsonl").write_text((json.dumps(row) + "\n") * number)
    done = subprocess.run(
        [sys.executable, str(ROOT / f"examples/data_preprocess/{name}.py"), "--local_dataset_path", str(tmp_path),
         "--local_save_dir", str(tmp_path / "out"), "--hdfs_dir", str(tmp_path / "shared")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "shared/out/test.parquet").exists()
    rows = load_dataset(str(tmp_path / "out/train.parquet"), make_tokenizer(), config(max_prompt_length=500))
    assert len(rows) == 5
    assert rows[3]["reward_model"] == {"style": "rule", "ground_truth": truth}
    assert rows[3]["index"] == 3
    scored = default_compute_score(rows[3]["data_source"], answer, truth, rows[3]["extra_info"])
    assert (scored["score"] if isinstance(scored, dict) else scored) == 1
