"""A first GRPO run: a tiny random model learns to answer with the digit that it is asked for.

    python examples/01_first_grpo_run.py

Reads nothing and needs no network; everything it makes lies under outputs/example_01.
"""

import json
from pathlib import Path

from verl.cli.main import main
from verl.models.tiny import make_tiny_model

HERE = Path("outputs/example_01")


def write_rows(path: Path, questions: range) -> None:
    """One JSON line a prompt: the messages, the name of the task, and what the scorer compares with."""
    with path.open("w") as file:
        for number in questions:
            row = {
                "data_source": "digits",
                "prompt": [{"role": "user", "content": f"Say {number % 10}."}],
                "reward_model": {"style": "rule", "ground_truth": str(number % 10)},
                "extra_info": {"index": number},
            }
            file.write(json.dumps(row) + "\n")


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The share of characters that are a digit, and a bonus when the first is the right one."""
    if not solution_str:
        return 0.0
    digits = sum(c.isdigit() for c in solution_str) / len(solution_str)
    return 0.5 * digits + 0.5 * (solution_str[0] == ground_truth)


if __name__ == "__main__":
    HERE.mkdir(parents=True, exist_ok=True)
    model = make_tiny_model(HERE / "model")
    write_rows(HERE / "train.jsonl", range(160))
    write_rows(HERE / "val.jsonl", range(10))
    code = main(
        [
            "train",
            "algorithm.adv_estimator=grpo",
            f"actor_rollout_ref.model.path={model}",
            f"data.train_files={HERE}/train.jsonl",
            f"data.val_files={HERE}/val.jsonl",
            "data.train_batch_size=16",
            "data.max_prompt_length=64",
            "data.max_response_length=4",
            "actor_rollout_ref.rollout.n=8",
            "actor_rollout_ref.actor.ppo_mini_batch_size=16",
            "actor_rollout_ref.actor.optim.lr=0.003",
            f"reward.custom_reward_function.path={__file__}",
            "trainer.total_training_steps=30",
            "trainer.save_freq=30",
            "trainer.test_freq=10",
            f"trainer.default_local_dir={HERE}/run",
            "trainer.resume_mode=disable",
        ]
    )
    if code == 0:
        summary = json.loads((HERE / "run" / "summary.json").read_text())
        print(f"reward {summary['reward_before']:.2f} -> {summary['reward_after']:.2f}; look into {HERE}/run")
    raise SystemExit(code)
