"""PPO with a critic: GAE advantages, a value model beside the policy, and a KL penalty to the reference policy.

python examples/04_ppo_with_critic.py
"""

import runpy
from pathlib import Path

HERE = Path("outputs/example_04")

if __name__ == "__main__":
    from verl.cli.main import main
    from verl.models.tiny import make_tiny_model

    example = runpy.run_path(str(Path(__file__).with_name("01_first_grpo_run.py")))
    HERE.mkdir(parents=True, exist_ok=True)
    example["write_rows"](HERE / "train.jsonl", range(320))
    example["write_rows"](HERE / "val.jsonl", range(10))
    model = make_tiny_model(HERE / "model")
    raise SystemExit(
        main(
            [
                "train",
                "algorithm.adv_estimator=gae",
                "algorithm.lam=0.95",
                "algorithm.use_kl_in_reward=True",
                "algorithm.kl_ctrl.kl_coef=0.001",
                f"actor_rollout_ref.model.path={model}",
                f"critic.model.path={model}",
                "critic.optim.lr=0.003",
                "trainer.critic_warmup=2",
                f"data.train_files={HERE}/train.jsonl",
                f"data.val_files={HERE}/val.jsonl",
                "data.train_batch_size=32",
                "data.max_prompt_length=64",
                "data.max_response_length=4",
                "actor_rollout_ref.actor.ppo_mini_batch_size=16",
                "actor_rollout_ref.actor.ppo_epochs=2",
                "actor_rollout_ref.actor.optim.lr=0.002",
                f"reward.custom_reward_function.path={Path(__file__).with_name('01_first_grpo_run.py')}",
                "trainer.total_training_steps=20",
                "trainer.test_freq=10",
                f"trainer.default_local_dir={HERE}/run",
                "trainer.resume_mode=disable",
            ]
        )
    )
