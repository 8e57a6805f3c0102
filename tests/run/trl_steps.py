"""Ten steps by TRL's own trainers on given rows, in their order; run by the Python of TRL's own environment.

Reads {"cases": {name: {"trainer", "model", "rows", "args", "template"}}} from the file named first; writes to the file named
second, for each case, TRL's log of every step: loss, grad_norm, learning_rate, and the metrics of the trainer. `args` go to the
trainer's config (SFTConfig for SFT), `template` is a chat template, or null for the tokenizer's own.
"""

import importlib
import json
import sys
import tempfile
from pathlib import Path

EXPERIMENTAL = {"CPO": "trl.experimental.cpo", "ORPO": "trl.experimental.orpo"}


def in_file_order(trainer):
    """A trainer that takes the rows in the order of the file; no other default of TRL's is changed."""
    from torch.utils.data import SequentialSampler

    class InFileOrder(trainer):
        def _get_train_sampler(self, train_dataset=None):
            return SequentialSampler(train_dataset if train_dataset is not None else self.train_dataset)

    return InFileOrder


def steps_of(case):
    """TRL's log of every step of a case."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    kind = case.get("trainer", "SFT")
    module = importlib.import_module(EXPERIMENTAL.get(kind, "trl"))
    tokenizer = AutoTokenizer.from_pretrained(case["model"])
    if case.get("template") is not None:
        tokenizer.chat_template = case["template"]
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "output_dir": folder,
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "model_init_kwargs": {"dtype": "float32"},
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "max_length": None,
            **case["args"],
        }
        trainer = in_file_order(getattr(module, f"{kind}Trainer"))(
            model=case["model"],
            args=getattr(module, f"{kind}Config")(**settings),
            train_dataset=Dataset.from_list(case["rows"]),
            processing_class=tokenizer,
        )
        if case.get("in_float64"):  # TRL loads models only in narrower dtypes
            trainer.model.double()
        trainer.train()
        return [row for row in trainer.state.log_history if "grad_norm" in row]


def main(task, answer):
    import torch

    torch.set_num_threads(1)
    steps = {name: steps_of(case) for name, case in json.loads(Path(task).read_text())["cases"].items()}
    Path(answer).write_text(json.dumps(steps))


if __name__ == "__main__":
    main(*sys.argv[1:])
