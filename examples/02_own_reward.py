"""A reward function of your own: any file with `compute_score`, named by `reward.custom_reward_function.path`.

    python examples/02_own_reward.py

It runs in worker processes with a time limit, may be `async`, and may return a dict: `score` trains, the rest is logged with
every sample and validated beside it.
"""

import runpy
from pathlib import Path

HERE = Path("outputs/example_02")


def compute_score(data_source, solution_str, ground_truth, extra_info=None, length_weight=0.3):
    """Prefer lower-case letters; `length_weight` comes from reward.custom_reward_function.reward_kwargs."""
    letters = sum(c.islower() for c in solution_str) / max(len(solution_str), 1)
    length = min(len(solution_str), 8) / 8
    return {"score": (1 - length_weight) * letters + length_weight * length, "letters": letters, "length": length}


if __name__ == "__main__":
    from verl.cli.main import main
    from verl.models.tiny import make_tiny_model

    HERE.mkdir(parents=True, exist_ok=True)
    example = runpy.run_path(str(Path(__file__).with_name("01_first_grpo_run.py")))
    example["write_rows"](HERE / "train.jsonl", range(160))
    example["write_rows"](HERE / "val.jsonl", range(10))
    raise SystemExit(
        main(
            [
                "train",
                "algorithm.adv_estimator=rloo",
                f"actor_rollout_ref.model.path={make_tiny_model(HERE / 'model')}",
                f"data.train_files={HERE}/train.jsonl",
                f"data.val_files={HERE}/val.jsonl",
                "data.train_batch_size=16",
                "data.max_prompt_length=64",
                "data.max_response_length=8",
                "actor_rollout_ref.rollout.n=4",
                "actor_rollout_ref.actor.ppo_mini_batch_size=8",
                "actor_rollout_ref.actor.optim.lr=0.003",
                f"reward.custom_reward_function.path={__file__}",
                "+reward.custom_reward_function.reward_kwargs.length_weight=0.2",
                "trainer.total_training_steps=15",
                "trainer.test_freq=5",
                f"trainer.default_local_dir={HERE}/run",
                "trainer.resume_mode=disable",
            ]
        )
    )
