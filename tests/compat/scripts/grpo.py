"""In the manner of trl/scripts/grpo.py: two reward functions with columns of the rows."""

import sys

from trl import GRPOConfig, GRPOTrainer

model_path, output_dir = sys.argv[1:3]
rows = [{"prompt": [{"role": "user", "content": f"Say {n}."}], "digit": str(n % 10)} for n in range(8)]


def digits(completions, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in texts]


def holds(prompts, completions, digit, **kwargs):
    assert all(prompt[0]["content"].startswith("Say") for prompt in prompts)
    return [float(w in completion[0]["content"]) for completion, w in zip(completions, digit, strict=True)]


args = GRPOConfig(
    output_dir=output_dir, per_device_train_batch_size=8, num_generations=4, max_completion_length=8, max_steps=3,
    learning_rate=1e-3, beta=0.01, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
    reward_weights=[1.0, 0.5],
)  # fmt: skip
trainer = GRPOTrainer(model=model_path, args=args, train_dataset=rows, reward_funcs=[digits, holds])
result = trainer.train()
trainer.save_model(f"{output_dir}/final")
