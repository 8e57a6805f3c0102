"""The measured process of TRL in sft_cpu.py and preference_cpu.py: a trainer that is built once and waits between its steps.

Runs in TRL's own environment, where verl is not installed. The trainer's loop is TRL's; a callback holds it before each
optimizer step until the parent asks for one, and replies when the step has ended.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from child import Channel, run_held
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoProcessor, AutoTokenizer, TrainerCallback
from weight_probe import WeightProbe
from workload import picture_in

FACTS = (
    *("gradient_accumulation_steps", "gradient_checkpointing", "packing", "max_length", "loss_type"),
    "precompute_ref_log_probs",
)


def in_file_order(kind: str) -> type:
    """SFTTrainer or DPOTrainer that takes the rows in the order of the file and keeps the loss of each optimizer step."""

    class InFileOrder(getattr(trl, f"{kind}Trainer")):  # type: ignore[misc]
        loss_of_step = 0.0

        def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
            return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            self.loss_of_step += float(loss)  # of a micro-batch, as its share of the whole step
            return loss

    return InFileOrder


class Gate(TrainerCallback):
    """Holds the trainer's loop until the parent wants a step, and replies with its seconds, tokens and loss."""

    def __init__(self, channel: Channel, trainer: Any):
        self.channel, self.trainer = channel, trainer
        self.probe = WeightProbe(trainer.model)
        self.started, self.num_tokens = 0.0, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.channel.next() is None:
            raise SystemExit(0)
        self.trainer.loss_of_step = 0.0
        self.num_tokens = float(self.trainer._total_train_tokens)
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.channel.reply(
            {
                "step_s": time.perf_counter() - self.started,
                "num_tokens": float(self.trainer._total_train_tokens) - self.num_tokens,
                "loss": self.trainer.loss_of_step,
                "weight_change": self.probe.change(),
            }
        )


def build(work: dict[str, Any], micro_batch: int, settings: dict[str, Any], folder: str) -> Any:
    """A trainer on the rows of `work`; what `settings` does not name and the job does not fix is TRL's default."""
    rows = [json.loads(line) for line in Path(work["file"]).read_text().splitlines()]
    for row in (row for row in rows if "images" in row):
        row["images"] = [picture_in(url) for url in row["images"]]
        row["prompt"][0]["content"] = row["prompt"][0]["content"].removeprefix("<image>")  # TRL writes it
    steps_micro_batches = max(1, work["rows_per_step"] // micro_batch)
    chosen = {
        "output_dir": folder,
        "use_cpu": True,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": steps_micro_batches,
        "learning_rate": work["learning_rate"],
        "lr_scheduler_type": "constant",
        "weight_decay": 0.01,
        "max_steps": work["num_steps"],
        "bf16": work["dtype"] == "bfloat16",
        "model_init_kwargs": {"dtype": work["dtype"]},
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **settings,
    }
    return in_file_order(work["trainer"])(
        model=work["model"],
        args=getattr(trl, f"{work['trainer']}Config")(**chosen),
        train_dataset=Dataset.from_list(rows),
        processing_class=(AutoProcessor if "images" in rows[0] else AutoTokenizer).from_pretrained(work["model"]),
    )


def facts(trainer: Any) -> dict[str, Any]:
    args = trainer.args
    return {
        "versions": {m.__name__: m.__version__ for m in (trl, transformers, torch)},
        "num_threads": torch.get_num_threads(),
        "micro_batch": args.per_device_train_batch_size,
        "optimizer": str(args.optim),
        **{name: getattr(args, name) for name in FACTS if hasattr(args, name)},
    }


def train(channel: Channel, **settings: Any) -> None:
    trainer = build(**settings)
    trainer.add_callback(Gate(channel, trainer))
    channel.reply(facts(trainer))
    trainer.train()


if __name__ == "__main__":
    run_held(train)
