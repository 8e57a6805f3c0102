"""Ten steps of TRL's GKDTrainer on given responses, in their order; run by the Python of TRL's own environment.

Reads {"cases": {name: {"model", "teacher", "rows", "args", "template"}}} from the file named first; writes to the file named
second, for each case, TRL's log of every step: loss, grad_norm, learning_rate. `args` go to GKDConfig.
"""

import json
import sys
import tempfile
from pathlib import Path


def main(task: str, answer: str) -> None:
    import torch
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoTokenizer
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    class InFileOrder(GKDTrainer):
        """Takes the rows in the order of the file, and no other default of TRL's is changed."""

        def _get_train_sampler(self, train_dataset=None):
            return SequentialSampler(train_dataset if train_dataset is not None else self.train_dataset)

    torch.set_num_threads(1)
    logs = {}
    for name, case in json.loads(Path(task).read_text())["cases"].items():
        tokenizer = AutoTokenizer.from_pretrained(case["model"])
        tokenizer.chat_template = case["template"]
        with tempfile.TemporaryDirectory() as folder:
            settings = {
                "output_dir": folder, "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
                "model_init_kwargs": {"dtype": "float32"}, "teacher_model_init_kwargs": {"dtype": "float32"},
                "lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "no", "report_to": [],
                "disable_tqdm": True, **case["args"],
            }  # fmt: skip
            trainer = InFileOrder(
                model=case["model"],
                teacher_model=case["teacher"],
                args=GKDConfig(**settings),
                train_dataset=Dataset.from_list(case["rows"]),
                processing_class=tokenizer,
            )
            trainer.train()
            logs[name] = [row for row in trainer.state.log_history if "grad_norm" in row]
    Path(answer).write_text(json.dumps(logs))


if __name__ == "__main__":
    main(*sys.argv[1:])
