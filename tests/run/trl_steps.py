"""Ten steps by TRL's own trainers on given rows, in their order; run by the Python of TRL's own environment.

Reads {"cases": {name: {"trainer", "model", "rows", "args", "template"}}} from the file named first; writes to the file named
second, for each case, TRL's log of every step: loss, grad_norm, learning_rate, and the metrics of the trainer. `args` go to the
trainer's config (SFTConfig for SFT), `template` is a chat template, or null for the tokenizer's own. GKD has a "teacher". Rows
of GRPO have a picture, and [prompt ids, response ids, log-probs] of its samples follow the log.
"""

import base64
import importlib
import io
import json
import sys
import tempfile
from pathlib import Path

EXPERIMENTAL = {kind: f"trl.experimental.{kind.lower()}" for kind in ("CPO", "ORPO", "GKD")}


def in_file_order(trainer):
    """A trainer that takes the rows in the order of the file; no other default of TRL's is changed."""
    from torch.utils.data import SequentialSampler

    class InFileOrder(trainer):
        def _get_train_sampler(self, train_dataset=None):
            return SequentialSampler(train_dataset if train_dataset is not None else self.train_dataset)

    return InFileOrder


def recording(trainer, samples):
    """GRPOTrainer that adds its samples to `samples`."""

    class Recording(trainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            masks = [output[f"{part}_mask"].bool() for part in ("prompt", "completion", "completion")]
            values = (output[name] for name in ("prompt_ids", "completion_ids", "old_per_token_logps"))
            samples.extend(zip(*([v[m].tolist() for v, m in zip(*part)] for part in zip(values, masks))))
            return output

    return Recording


def share_of_letters(completions, **_):
    texts = [reply[0]["content"] for reply in completions]
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in texts]


def with_picture(row):
    from PIL import Image

    return {**row, "image": Image.open(io.BytesIO(base64.b64decode(row["image"].split(",")[1])))}


def steps_of(case):
    """TRL's log of every step of a case."""
    from datasets import Dataset
    from transformers import AutoProcessor, AutoTokenizer

    kind, rows, samples = case.get("trainer", "SFT"), case["rows"], []
    module = importlib.import_module(EXPERIMENTAL.get(kind, "trl"))
    trainer, config = (getattr(module, f"{kind}{part}") for part in ("Trainer", "Config"))
    tokenizer = AutoTokenizer.from_pretrained(case["model"])
    if case.get("template") is not None:
        tokenizer.chat_template = case["template"]
    more = {"processing_class": tokenizer, **({"teacher_model": case["teacher"]} if "teacher" in case else {})}
    if kind == "GRPO":
        processor = AutoProcessor.from_pretrained(case["model"], padding_side="left")
        processor.chat_template = tokenizer.chat_template
        more = {"processing_class": processor, "reward_funcs": share_of_letters}
        trainer, rows = recording(trainer, samples), [with_picture(row) for row in rows]
    else:
        trainer = in_file_order(trainer)
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
            **({"shuffle_dataset": False} if kind == "GRPO" else {"max_length": None}),
            **case["args"],
        }
        train_dataset = Dataset.from_list(rows)
        trainer = trainer(model=case["model"], args=config(**settings), train_dataset=train_dataset, **more)
        if case.get("in_float64"):  # TRL loads models only in narrower dtypes
            trainer.model.double()
        trainer.train()
        return [row for row in trainer.state.log_history if "grad_norm" in row] + samples


def main(task, answer):
    import torch

    torch.set_num_threads(1)
    steps = {name: steps_of(case) for name, case in json.loads(Path(task).read_text())["cases"].items()}
    Path(answer).write_text(json.dumps(steps))


if __name__ == "__main__":
    main(*sys.argv[1:])
