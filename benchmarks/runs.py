"""Whole runs of `verl train`: their data and reward files, their metrics, the seconds of their steps."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WARM_UP = 2  # steps that do not count
REWARD = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None, seconds=0.5):
    time.sleep(seconds)
    return sum(c.isalpha() for c in solution_str) / max(len(solution_str), 1)
"""
SPLIT = (
    "trainer.n_gpus_per_node=2",
    "trainer.placement={actor:[0],rollout:[1],reward:[1]}",
    "ray_kwargs.ray_init.num_cpus=2",
)
_RUN_LIMIT_S = 1800.0

Row = dict[str, Any]  # a line of metrics.jsonl


def write_prompts(file: Path, texts: Sequence[str]) -> None:
    """A data file of `verl train` with a row for each text."""
    rows = [
        {"data_source": "letters", "prompt": [{"role": "user", "content": text}],
         "reward_model": {"style": "rule", "ground_truth": "letters"}}
        for text in texts
    ]  # fmt: skip
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(run: Path, changes: Sequence[str], *, threads: int | None = None, launcher: Sequence[str] = ()) -> list[Row]:
    """Run `verl train` in the new folder `run`; returns its metrics of every step. `threads`: threads of each process (None:
    as the environment says). `launcher`: arguments of Python that start the module in several processes."""
    command = [sys.executable, *launcher, "-m", "verl", "train", *changes, f"trainer.default_local_dir={run}"]
    environment = os.environ if threads is None else {**os.environ, "OMP_NUM_THREADS": str(threads)}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment, timeout=_RUN_LIMIT_S)
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def step_seconds(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Seconds between the rows of two steps that follow one another, after the warm-up."""
    times = [row["time"] for row in rows if row["step"] >= WARM_UP]
    return [later - earlier for earlier, later in itertools.pairwise(times)]
