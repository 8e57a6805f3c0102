"""Distillation with TRL's GKDTrainer, or with RLRunner in its place: gkd.py MODEL TEACHER ROWS trl|verl HISTORY FOLDER."""

import json
import sys
from pathlib import Path

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.gkd import GKDConfig, GKDTrainer

model, teacher, rows, side, history, folder = sys.argv[1:]
losses = []


class RecordedTrainer(GKDTrainer):
    def training_step(self, *args, **settings):
        loss = super().training_step(*args, **settings)
        losses.append(loss.item())
        return loss


trainer_class = RecordedTrainer
if side == "verl":
    from verl import RLRunner as trainer_class
args = GKDConfig(
    folder, per_device_train_batch_size=4, max_steps=3, learning_rate=1e-3, lr_scheduler_type="constant", logging_steps=1,
    report_to="none", use_cpu=True, save_strategy="no", bf16=False, gradient_checkpointing=False, lmbda=0.0, beta=0.5,
    max_new_tokens=64,
)  # fmt: skip
trainer = trainer_class(
    model=AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
    teacher_model=AutoModelForCausalLM.from_pretrained(teacher, dtype="float32"),
    args=args,
    train_dataset=Dataset.from_list([json.loads(line) for line in Path(rows).read_text().splitlines()]),
    processing_class=AutoTokenizer.from_pretrained(model),
)
trainer.train()
logged = [row for row in trainer.state.log_history if "loss" in row]
for row, loss in zip(logged, losses, strict=False):
    row["loss"] = loss
Path(history).write_text(json.dumps(logged))
