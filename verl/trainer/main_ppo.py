"""`python -m verl.trainer.main_ppo key=value ...` is `verl train key=value ...`; recipes import from here too."""

from __future__ import annotations

import sys

from verl.cli.main import run_verb
from verl.compat.datasets import create_rl_dataset, create_rl_sampler
from verl.compat.trainer import TaskRunner, run_ppo

__all__ = ["TaskRunner", "create_rl_dataset", "create_rl_sampler", "run_ppo"]

if __name__ == "__main__":
    raise SystemExit(run_verb("train", sys.argv[1:], whole_process=True))
