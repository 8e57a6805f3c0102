"""An advantage estimator of your own: one function, named by `path/to/file.py:name`.

python examples/03_own_advantage.py
"""

import runpy
from pathlib import Path

HERE = Path("outputs/example_03")


def best_of_group(token_level_rewards, response_mask, *, index):
    """+1 for the best sample of each prompt, -1/(n-1) for the others; zero when all are equal.

    token_level_rewards and response_mask are [batch, response]; index holds the group of each row. Returns (advantages,
    returns), both [batch, response].
    """
    rewards = token_level_rewards.sum(dim=1)
    advantages = rewards.new_zeros(rewards.shape)
    for group in set(index):
        rows = [i for i, g in enumerate(index) if g == group]
        scores = rewards[rows]
        if len(rows) > 1 and scores.max() > scores.min():
            advantages[rows] = -1.0 / (len(rows) - 1)
            advantages[rows[int(scores.argmax())]] = 1.0
    spread = advantages.unsqueeze(1) * response_mask
    return spread, spread


if __name__ == "__main__":
    from verl.cli.main import main
    from verl.models.tiny import make_tiny_model

    example = runpy.run_path(str(Path(__file__).with_name("01_first_grpo_run.py")))
    HERE.mkdir(parents=True, exist_ok=True)
    example["write_rows"](HERE / "train.jsonl", range(160))
    raise SystemExit(
        main(
            [
                "train",
                f"algorithm.adv_estimator={__file__}:best_of_group",
                f"actor_rollout_ref.model.path={make_tiny_model(HERE / 'model')}",
                f"data.train_files={HERE}/train.jsonl",
                f"data.val_files={HERE}/train.jsonl",
                "data.val_max_samples=10",
                "data.train_batch_size=16",
                "data.max_prompt_length=64",
                "data.max_response_length=4",
                "actor_rollout_ref.rollout.n=8",
                "actor_rollout_ref.actor.ppo_mini_batch_size=16",
                "actor_rollout_ref.actor.optim.lr=0.003",
                f"reward.custom_reward_function.path={Path(__file__).with_name('01_first_grpo_run.py')}",
                "trainer.total_training_steps=15",
                "trainer.test_freq=5",
                f"trainer.default_local_dir={HERE}/run",
                "trainer.resume_mode=disable",
            ]
        )
    )
