"""Supervised fine-tuning, then GRPO from its checkpoint: a tiny random model learns to answer with the digit asked for.

python examples/06_fine_tune_first.py
"""

import verl
from verl.models.tiny import make_tiny_model

HERE = "outputs/example_06"
DATA = {"data.train_batch_size": 16}


def is_answer(completions, answer, **columns):
    """1 for the right digit and nothing else."""
    return [float(text == a) for text, a in zip(completions, answer, strict=True)]


if __name__ == "__main__":
    rows = [{"prompt": f"Say {n % 10}.", "answer": str(n % 10)} for n in range(160)]
    chats = [
        {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["answer"]}]}
        for row in rows
    ]
    tuned = verl.sft(
        make_tiny_model(f"{HERE}/model"), chats, eval_data=chats[:10], output_dir=f"{HERE}/sft", config=DATA,
        optim={"lr": 0.003}, trainer={"total_epochs": 3, "test_freq": "after_each_epoch", "resume_mode": "disable"},
    )  # fmt: skip
    verl.train(
        tuned.model_path, rows, is_answer, eval_data=rows[:10], output_dir=f"{HERE}/run",
        config={**DATA, "data.max_prompt_length": 64, "data.max_response_length": 4},
        actor_rollout_ref={"rollout": {"n": 8}, "actor": {"ppo_mini_batch_size": 16, "optim": {"lr": 0.001}}},
        trainer={"total_training_steps": 10, "test_freq": 10, "resume_mode": "disable"},
    )  # fmt: skip
