"""DPO on pairs: a tiny random model learns to prefer short answers, and held-out pairs show it.

    python examples/07_learn_from_preferences.py

Reads nothing and needs no network; all files that it makes are under outputs/example_07.
"""

import json
from pathlib import Path

from verl.cli.main import main
from verl.models.tiny import make_tiny_model

HERE = Path("outputs/example_07")


def write_rows(path: Path, questions: range) -> None:
    """One JSON line a pair: the same answer, once followed by filler words."""
    with path.open("w") as file:
        for number in questions:
            prompt = [{"role": "user", "content": f"Say {number % 10}."}]
            row = {"prompt": prompt, "chosen": str(number % 10), "rejected": f"{number % 10}, well, as you asked"}
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    HERE.mkdir(parents=True, exist_ok=True)
    model = make_tiny_model(HERE / "model")
    write_rows(HERE / "train.jsonl", range(64))
    write_rows(HERE / "val.jsonl", range(70, 80))
    code = main(
        [
            "dpo",
            f"model.path={model}",
            f"data.train_files={HERE}/train.jsonl",
            f"data.val_files={HERE}/val.jsonl",
            "data.train_batch_size=8",
            "optim.lr=0.001",
            "preference.beta=0.1",
            "trainer.total_epochs=1",
            "trainer.val_before_train=True",
            "trainer.test_freq=after_each_epoch",
            "trainer.save_freq=after_each_epoch",
            f"trainer.default_local_dir={HERE}/run",
        ]
    )
    raise SystemExit(code)
