"""Seconds and memory of a start against the number of rows, with the fitted exponent.

    python -m benchmarks.scale                      the tables of starts in docs/scale.md

Each size has a generated parquet file and a GRPO run of a tiny model, started twice in new run folders: the first start has an
empty cache. Seconds count from the start of the process to the end of the first step. Memory is the highest sum over the
processes of a run, where processes share the memory that they have in common (PSS).
"""

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import psutil
import pyarrow
import pyarrow.parquet

from verl.models.tiny import make_tiny_model

SIZES = (1_000, 20_000, 400_000, 5_000_000)
MODES = {"": (), " with filter_overlong_prompts": ("data.filter_overlong_prompts=True",)}
_RUN_LIMIT_S = 1200.0
_POLL_S = 0.25
_ROWS_WRITTEN = 100_000  # at once
REWARD = "def compute_score(solution_str, **columns):\n    return len(solution_str) % 7\n"


def write_rows(path: Path, num_rows: int) -> None:
    """A parquet file of questions, each with one message, a reference answer and an index."""
    with pyarrow.parquet.ParquetWriter(path, _table(range(1)).schema) as writer:
        for start in range(0, num_rows, _ROWS_WRITTEN):
            writer.write_table(_table(range(start, min(start + _ROWS_WRITTEN, num_rows))))


def _table(numbers: range) -> pyarrow.Table:
    ask = "What is {} + {}? Think about it, then answer with a number.".format
    terms = [(i, i * 7 % 1000) for i in numbers]
    columns = {
        "data_source": ["sums"] * len(terms),
        "prompt": [[{"role": "user", "content": ask(a, b)}] for a, b in terms],
        "reward_model": [{"style": "rule", "ground_truth": str(a + b)} for a, b in terms],
        "extra_info": [{"index": i} for i in numbers],
    }
    return pyarrow.table(columns)


def overrides(model: Path, folder: Path, rows: Path) -> list[str]:
    """Keys of a run of two small steps on the file `rows`."""
    (folder / "reward.py").write_text(REWARD)
    keys = {
        "algorithm.adv_estimator": "grpo", "actor_rollout_ref.model.path": model, "actor_rollout_ref.rollout.n": 2,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 8, "data.train_files": rows, "data.val_files": "[]",
        "data.train_batch_size": 8, "data.max_prompt_length": 256, "data.max_response_length": 8,
        "reward.custom_reward_function.path": folder / "reward.py", "reward.num_workers": 1, "trainer.device": "cpu",
        "trainer.page.enable": False, "trainer.logger": "[file]", "trainer.val_before_train": False,
        "trainer.total_training_steps": 2,
    }  # fmt: skip
    return [f"{key}={value}" for key, value in keys.items()]


def measure(run: Path, changes: Sequence[str], cache: Path) -> tuple[float, float]:
    """Start `verl train` in the new folder `run`: seconds to the end of the first step, GB of memory."""
    command = [sys.executable, "-m", "verl", "train", *changes, f"trainer.default_local_dir={run}"]
    started, memory = time.time(), 0
    environment = {**os.environ, "VERL_DATA_CACHE": str(cache)}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as process:
        while process.poll() is None:
            memory = max(memory, shared_bytes(process.pid))
            if time.time() - started > _RUN_LIMIT_S:
                process.terminate()
            time.sleep(_POLL_S)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return next(line["time"] for line in lines if line["step"] == 1) - started, memory / 1e9


def shared_bytes(pid: int) -> int:
    """PSS of a process and its descendants; 0 where one of them has just ended."""
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid)
        return sum(process.memory_full_info().pss for process in (parent, *parent.children(recursive=True)))
    return 0


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """The slope of log cost against log size, by least squares: 0 for a constant, 1 where cost is proportional to size."""
    slope, _ = np.polyfit([math.log(size) for size in sizes], [math.log(cost) for cost in costs], 1)
    return float(slope)


class Costs:
    """Quantity -> its cost at each size so far."""

    def __init__(self, sizes: Sequence[int]):
        self.sizes, self.rows = sizes, dict[str, list[float]]()

    def add(self, size: int, row: Mapping[str, float]) -> None:
        for name, cost in row.items():
            self.rows.setdefault(name, []).append(cost)
        print(f"{size:,}: {', '.join(f'{name} {cost:.3g}' for name, cost in row.items())}", flush=True)

    def table(self) -> str:
        """A Markdown table with a row for each quantity."""
        head = f"| | {' | '.join(f'{size:,}' for size in self.sizes)} | exponent |"
        lines = [head, "|---|" + "---|" * (len(self.sizes) + 1)]
        for name, row in self.rows.items():
            slope = f"{exponent(self.sizes, row):.2f}" if len(row) > 1 else ""
            lines.append(f"| {name} | {' | '.join(f'{cost:.3g}' for cost in row)} | {slope} |")
        return "\n".join(lines)


def measure_starts(sizes: Sequence[int], folder: Path) -> None:
    model = make_tiny_model(folder / "model")
    for size in sizes:
        write_rows(folder / f"{size}.parquet", size)
    for mode, keys in MODES.items():
        seconds, memory = Costs(sizes), Costs(sizes)
        for size in sizes:
            changes = (*overrides(model, folder, folder / f"{size}.parquet"), *keys)
            for attempt in ("first start", "second start"):
                run = folder / f"{size}{mode}-{attempt}".replace(" ", "-")
                start_s, memory_gb = measure(run, changes, folder / f"cache-{size}-{len(mode)}")
                seconds.add(size, {f"seconds to the first step, {attempt}{mode}": start_s})
                memory.add(size, {f"memory (GB), {attempt}{mode}": memory_gb})
        seconds.rows |= memory.rows
        print(seconds.table(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of a run against its size.")
    parser.add_argument(
        "--sizes", type=lambda text: [*map(int, text.split(","))], default=SIZES, help="rows, increasing"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure_starts(arguments.sizes, Path(folder))


if __name__ == "__main__":
    main()
