"""DPO on pairs: a tiny random model learns to prefer short answers, and held-out pairs show it.

python examples/07_learn_from_preferences.py
"""

import verl
from verl.models.tiny import make_tiny_model

HERE = "outputs/example_07"


def pair(n: int) -> dict[str, str]:
    """The same answer, once followed by filler words."""
    return {"prompt": f"Say {n % 10}.", "chosen": str(n % 10), "rejected": f"{n % 10}, well, as you asked"}


if __name__ == "__main__":
    verl.dpo(
        make_tiny_model(f"{HERE}/model"), [pair(n) for n in range(64)], eval_data=[pair(n) for n in range(70, 80)],
        output_dir=f"{HERE}/run", config={"data.train_batch_size": 8, "preference.beta": 0.1}, optim={"lr": 0.001},
        trainer={"total_epochs": 1, "val_before_train": True, "test_freq": "after_each_epoch", "resume_mode": "disable"},
    )  # fmt: skip
