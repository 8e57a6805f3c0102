"""A first GRPO run: a tiny random model learns to answer with digits.

python examples/01_first_grpo_run.py

Such a model cannot read its prompt: it ends with one digit for all prompts, and the run warns of that. The example
reads nothing and needs no network; all files that it makes are under outputs/example_01.
"""

import json

import verl
from verl.models.tiny import make_tiny_model

HERE = "outputs/example_01"


def digits(completions, answer, **columns):
    """The share of characters that are digits, and a bonus when the first is the right one."""
    shares = [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]
    return [0.5 * share + 0.5 * text.startswith(a) for share, text, a in zip(shares, completions, answer, strict=True)]


if __name__ == "__main__":
    rows = [{"prompt": f"Say {n % 10}.", "answer": str(n % 10)} for n in range(160)]
    run = verl.train(
        make_tiny_model(f"{HERE}/model"), rows, digits, eval_data=rows[:10], output_dir=f"{HERE}/run",
        config={"data": {"train_batch_size": 16, "max_prompt_length": 64, "max_response_length": 4}},
        actor_rollout_ref={"rollout": {"n": 8}, "actor": {"ppo_mini_batch_size": 16, "optim": {"lr": 0.003}}},
        trainer={"total_training_steps": 30, "test_freq": 10, "resume_mode": "disable"},
    )  # fmt: skip
    summary = json.loads((run.folder / "summary.json").read_text())
    print(f"reward {summary['reward_before']:.2f} -> {summary['reward_after']:.2f}; the model is {run.model_path}")
