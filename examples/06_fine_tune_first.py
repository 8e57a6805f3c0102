"""Supervised fine-tuning, then GRPO from its checkpoint: a tiny random model learns to answer with the digit asked for.

    python examples/06_fine_tune_first.py

Reads nothing and needs no network; all files that it makes are under outputs/example_06.
"""

import json
from pathlib import Path

from verl.cli.main import main
from verl.models.tiny import make_tiny_model

HERE = Path("outputs/example_06")


def write_rows(path: Path, questions: range) -> None:
    """One JSON line a row: `messages` for fine-tuning; `prompt` and `reward_model` for GRPO."""
    with path.open("w") as file:
        for number in questions:
            prompt = [{"role": "user", "content": f"Say {number % 10}."}]
            row = {
                "messages": [*prompt, {"role": "assistant", "content": str(number % 10)}],
                "data_source": "digits",
                "prompt": prompt,
                "reward_model": {"style": "rule", "ground_truth": str(number % 10)},
                "extra_info": {"index": number},
            }
            file.write(json.dumps(row) + "\n")


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1 for the right digit and nothing else."""
    return float(solution_str == ground_truth)


if __name__ == "__main__":
    HERE.mkdir(parents=True, exist_ok=True)
    model = make_tiny_model(HERE / "model")
    write_rows(HERE / "train.jsonl", range(160))
    write_rows(HERE / "val.jsonl", range(10))
    code = main(
        [
            "sft",
            f"model.path={model}",
            f"data.train_files={HERE}/train.jsonl",
            f"data.val_files={HERE}/val.jsonl",
            "data.train_batch_size=16",
            "optim.lr=0.003",
            "trainer.total_epochs=3",
            "trainer.test_freq=after_each_epoch",
            "trainer.save_freq=after_each_epoch",
            f"trainer.default_local_dir={HERE}/sft",
        ]
    )
    assert code == 0, "fine-tuning failed; see the message above"
    code = main(
        [
            "train",
            "algorithm.adv_estimator=grpo",
            f"actor_rollout_ref.model.path={HERE}/sft/global_step_30/model/huggingface",
            f"data.train_files={HERE}/train.jsonl",
            f"data.val_files={HERE}/val.jsonl",
            "data.train_batch_size=16",
            "data.max_prompt_length=64",
            "data.max_response_length=4",
            "actor_rollout_ref.rollout.n=8",
            "actor_rollout_ref.actor.ppo_mini_batch_size=16",
            "actor_rollout_ref.actor.optim.lr=0.001",
            f"reward.custom_reward_function.path={__file__}",
            "trainer.total_training_steps=10",
            "trainer.test_freq=10",
            f"trainer.default_local_dir={HERE}/run",
        ]
    )
    raise SystemExit(code)
