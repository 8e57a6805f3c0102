"""The README's Python example runs in an empty folder, with the name of a tiny model; so does the estimator of
docs/python.md. Both learn: the reward is there, and gradients are not zero."""

import json
import os
import re
from pathlib import Path

import pytest

from tests.forked import run_forked
from verl.models.tiny import make_tiny_model

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
# what a block holds -> its page, the model that it names, and what a random model needs: few rows, and a score that it can get
BLOCKS = {
    "verl.train": (
        "README.md",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        {"a in range(10)": "a in range(1)", 'text.rstrip(".").split()[-1:] == [a]': "a in text"},
    ),
    "def centred": ("docs/python.md", "model", {}),
}


@pytest.mark.parametrize("words", BLOCKS)
def test_an_example_learns_as_it_is_written(words, tmp_path):
    page, model, replaced = BLOCKS[words]
    blocks = [code for code in BLOCK.findall((ROOT / page).read_text("utf-8")) if words in code]
    assert len(blocks) == 1
    (code,) = blocks
    assert code.count(f'"{model}"') == 1
    for text, other in replaced.items():
        assert code.count(text) == 1
        code = code.replace(text, other)
    folder = make_tiny_model(tmp_path / "models" / "tiny")
    (tmp_path / "empty").mkdir()
    script = tmp_path / "empty" / "example.py"
    script.write_text(code.replace(f'"{model}"', repr(str(folder))))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "VERL_PAGE": "0"}
    exit_code, said = run_forked(script, cwd=script.parent, env=environment, timeout_s=240)
    assert exit_code == 0, said[-3000:]
    (metrics,) = (tmp_path / "empty" / "runs").rglob("metrics.jsonl")
    steps = [
        row
        for line in metrics.read_text().splitlines()
        if "actor/grad_norm" in (row := json.loads(line).get("data", json.loads(line)))
    ]
    assert len(steps) > 1
    assert all(step["actor/grad_norm"] > 0 for step in steps)
    assert all(step["critic/score/max"] > step["critic/score/min"] for step in steps)
    assert list(metrics.parent.glob("global_step_*/actor/huggingface/config.json"))


def test_the_readme_is_short_and_names_no_key_in_python():
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= 120
    (code,) = BLOCK.findall(text)
    assert len(code.splitlines()) <= 12
    assert not re.search(r"config|trainer|actor_rollout_ref", code)
