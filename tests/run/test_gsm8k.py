"""GSM8K from its own file format to a trained and validated model, with the built-in scorer."""

import json

import pytest

from verl.config import load_config
from verl.data.prepare import main as prepare
from verl.run.host import train

ROWS = [
    ("Tom has 3 apples and buys 4 more. How many has he?", "He has 3+4 = <<3+4=7>>7 apples.\n#### 7"),
    ("A box holds 12 eggs. How many eggs are in 5 boxes?", "5 boxes hold 12*5 = <<12*5=60>>60 eggs.\n#### 60"),
    ("Ann saves $1,000 a month. How much in a year?", "She saves 1000*12 = <<1000*12=12000>>12,000.\n#### 12,000"),
    ("A train goes 60 km an hour. How far in 2.5 hours?", "It goes 60*2.5 = <<60*2.5=150>>150 km.\n#### 150"),
]


@pytest.fixture
def gsm8k(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("train", "test"):
        lines = [json.dumps({"question": q, "answer": a}) for q, a in ROWS]
        (source / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    assert not prepare(["gsm8k", "--source", str(source), "--output", str(tmp_path / "data")])
    return tmp_path / "data"


def test_gsm8k_trains_and_validates(gsm8k, tiny_llama, tmp_path):
    folder = tmp_path / "run"
    overrides = [
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={tiny_llama}",
        f"data.train_files={gsm8k}/train.parquet",
        f"data.val_files={gsm8k}/test.parquet",
        "data.train_batch_size=2",
        "data.max_prompt_length=512",
        "data.max_response_length=8",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "trainer.logger=[file]",
        "trainer.total_training_steps=2",
        "trainer.test_freq=2",
        f"trainer.default_local_dir={folder}",
    ]
    assert train(load_config(overrides)) == 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[2]["val-core/openai/gsm8k/acc/mean@1"] == 0.0  # a random byte model knows no arithmetic
    assert rows[1]["reward/num_defaulted"] == 0
