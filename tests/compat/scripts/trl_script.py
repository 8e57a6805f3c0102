"""A script of TRL with its trainer, or with RLRunner in its place: trl_script.py SCRIPT CLASS trl|verl HISTORY ARGUMENTS."""

import importlib
import json
import sys
from pathlib import Path

import trl

script, trainer, side, history, *arguments = sys.argv[1:]
replaced = importlib.import_module("verl").RLRunner if side == "verl" else getattr(trl, trainer)
trainers = []


losses = []  # of TRL, whose log history rounds to four digits


class RecordedTrainer(replaced):
    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        trainers.append(self)

    def training_step(self, *args, **settings):
        loss = super().training_step(*args, **settings)
        losses.append(loss.item())
        return loss


setattr(trl, trainer, RecordedTrainer)
module = importlib.import_module(f"trl.scripts.{script}")
module.main(*module.make_parser().parse_args_and_config(arguments, fail_with_unknown_args=False))
rows = [row for row in trainers[0].state.log_history if "loss" in row]
for row, loss in zip(rows, losses, strict=False):  # a micro-batch is a step
    row["loss"] = loss
Path(history).write_text(json.dumps(rows))
