"""A script of TRL with its trainer, or with RLRunner in its place: trl_script.py SCRIPT CLASS trl|verl HISTORY ARGUMENTS."""

import importlib
import json
import sys
from pathlib import Path

import trl

script, trainer, side, history, *arguments = sys.argv[1:]
replaced = importlib.import_module("verl").RLRunner if side == "verl" else getattr(trl, trainer)
trainers = []


class RecordedTrainer(replaced):
    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        trainers.append(self)


setattr(trl, trainer, RecordedTrainer)
module = importlib.import_module(f"trl.scripts.{script}")
module.main(*module.make_parser().parse_args_and_config(arguments, fail_with_unknown_args=False))
Path(history).write_text(json.dumps(trainers[0].state.log_history))
