"""GSM8K from its own file format to a trained and validated model, with the built-in scorer."""

import json

from verl.data.prepare import main as prepare

ROWS = [
    ("Tom has 3 apples and buys 4 more. How many has he?", "He has 3+4 = <<3+4=7>>7 apples.\n#### 7"),
    ("A box holds 12 eggs. How many eggs are in 5 boxes?", "5 boxes hold 12*5 = <<12*5=60>>60 eggs.\n#### 60"),
    ("Ann saves $1,000 a month. How much in a year?", "She saves 1000*12 = <<1000*12=12000>>12,000.\n#### 12,000"),
    ("A train goes 60 km an hour. How far in 2.5 hours?", "It goes 60*2.5 = <<60*2.5=150>>150 km.\n#### 150"),
]


def test_gsm8k_trains_and_validates(tiny_run, tmp_path):
    for name in ("train", "test"):
        lines = [json.dumps({"question": q, "answer": a}) for q, a in ROWS]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    assert not prepare(["gsm8k", "--source", str(tmp_path), "--output", str(tmp_path)])
    rows = tiny_run(
        f"data.train_files={tmp_path}/train.parquet", f"data.val_files={tmp_path}/test.parquet", "data.train_batch_size=2",
        "data.max_prompt_length=512", "reward.custom_reward_function.path=null", "trainer.val_before_train=True",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.test_freq=2",
    ).rows  # fmt: skip
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[2]["val-core/openai/gsm8k/acc/mean@1"] == 0.0  # a random byte model knows no arithmetic
    assert rows[1]["reward/num_defaulted"] == 0
