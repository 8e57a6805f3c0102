"""A reward function of your own, in verl's form: it scores one sample and returns a number or a dict.

python examples/02_own_reward.py

It runs in worker processes with a time limit and may be `async`. Of a dict, `score` trains; the other numbers are logged with
every sample and averaged as metrics.
"""

import verl
from verl.models.tiny import make_tiny_model

HERE = "outputs/example_02"


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Prefer long answers of lower-case letters."""
    letters = sum(c.islower() for c in solution_str) / max(len(solution_str), 1)
    length = min(len(solution_str), 8) / 8
    return {"score": 0.8 * letters + 0.2 * length, "letters": letters, "length": length}


if __name__ == "__main__":
    rows = [{"prompt": f"Say {n % 10}."} for n in range(160)]
    verl.train(
        make_tiny_model(f"{HERE}/model"), rows, compute_score, eval_data=rows[:10], output_dir=f"{HERE}/run",
        algorithm="rloo",
        config={"data": {"train_batch_size": 16, "max_prompt_length": 64, "max_response_length": 8}},
        actor_rollout_ref={"rollout": {"n": 4}, "actor": {"ppo_mini_batch_size": 8, "optim": {"lr": 0.003}}},
        trainer={"total_training_steps": 15, "test_freq": 5, "resume_mode": "disable"},
    )  # fmt: skip
