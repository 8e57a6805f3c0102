"""Train two steps, evaluate the trained model, export it, and load the export with plain transformers.

python examples/05_evaluate_and_export.py
"""

from transformers import AutoModelForCausalLM

import verl
from verl.cli.main import main
from verl.models.tiny import make_tiny_model

HERE = "outputs/example_05"
DATA = {"data": {"train_batch_size": 16, "max_prompt_length": 64, "max_response_length": 4}}


def digits(completions, **columns):
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


if __name__ == "__main__":
    rows = [{"prompt": f"Say {n % 10}."} for n in range(80)]
    trainer = {"total_training_steps": 2, "resume_mode": "disable"}
    model = make_tiny_model(f"{HERE}/model")
    run = verl.train(model, rows, digits, eval_data=rows[:10], output_dir=f"{HERE}/run", config=DATA, trainer=trainer)
    assert main(["export", str(run.folder), f"{HERE}/exported", "--dtype", "float32"]) == 0
    metrics = verl.evaluate(f"{HERE}/exported", rows[:10], digits, output_dir=f"{HERE}/evaluation", config=DATA)
    exported = AutoModelForCausalLM.from_pretrained(f"{HERE}/exported")
    num_parameters = sum(p.numel() for p in exported.parameters())
    print(f"{num_parameters:,} parameters, held-out reward {metrics['val/reward']:.3f}")
