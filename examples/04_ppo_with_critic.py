"""PPO with a critic: GAE advantages, a value model, and a KL penalty to the reference policy.

python examples/04_ppo_with_critic.py
"""

import verl
from verl.models.tiny import make_tiny_model

HERE = "outputs/example_04"


def digits(completions, **columns):
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


if __name__ == "__main__":
    rows = [{"prompt": f"Say {n % 10}."} for n in range(320)]
    actor = {"ppo_mini_batch_size": 16, "ppo_epochs": 2, "optim": {"lr": 0.002}}
    verl.train(
        make_tiny_model(f"{HERE}/model"), rows, digits, eval_data=rows[:10], output_dir=f"{HERE}/run", algorithm="ppo",
        config={"data": {"train_batch_size": 32, "max_prompt_length": 64, "max_response_length": 4}},
        actor_rollout_ref={"actor": actor}, critic={"optim": {"lr": 0.003}},
        trainer={"total_training_steps": 20, "critic_warmup": 2, "test_freq": 10, "resume_mode": "disable"},
        **{"algorithm.lam": 0.95, "algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.001},
    )  # fmt: skip
