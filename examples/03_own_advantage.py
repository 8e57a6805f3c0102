"""An advantage estimator of your own: a function, given as `algorithm`.

python examples/03_own_advantage.py
"""

import verl
from verl.models.tiny import make_tiny_model

HERE = "outputs/example_03"


def best_of_group(token_level_rewards, response_mask, *, index):
    """+1 for the best sample of each prompt, -1/(n-1) for the others; zero when all are equal.

    token_level_rewards and response_mask are [batch, response]; `index` names the group of each row. Returns (advantages,
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
    advantages = advantages.unsqueeze(1) * response_mask
    return advantages, advantages


def digits(completions, **columns):
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


if __name__ == "__main__":
    rows = [{"prompt": f"Say {n % 10}."} for n in range(160)]
    verl.train(
        make_tiny_model(f"{HERE}/model"), rows, digits, eval_data=rows[:10], output_dir=f"{HERE}/run",
        algorithm=best_of_group,
        config={"data": {"train_batch_size": 16, "max_prompt_length": 64, "max_response_length": 4}},
        actor_rollout_ref={"rollout": {"n": 8}, "actor": {"ppo_mini_batch_size": 16, "optim": {"lr": 0.003}}},
        trainer={"total_training_steps": 15, "test_freq": 5, "resume_mode": "disable"},
    )  # fmt: skip
