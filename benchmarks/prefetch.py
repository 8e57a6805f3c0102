"""Samples made ahead of training against samples made right before it, with a reward that takes its time.

    python benchmarks/prefetch.py                       # reward of 0.5 s, prefetch 2, a tiny model made on the spot
    python benchmarks/prefetch.py --split               # rollout and reward on a separate device, for both sides
    python benchmarks/prefetch.py --model FOLDER --steps 10 --reward-seconds 2 --prefetch 1 --json out.json

Both are whole runs of `verl train` on the same prompts; they alternate. The seconds of a step are a run's mean from the end of
its second step to the end of its last (from metrics.jsonl), since samples made ahead come in bursts. The ratio compares the
medians over the rounds. On one device generation and training do not overlap: the gain is the wait for the scores. With
--split (extra `ray`) both sides train on one device and generate and score on another, each of them a process with one thread,
and generation can be hidden as well. Exit code 1: a sample trained that was older than --prefetch weight versions.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from report import Series, ratio, table

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
_AGE = "training/off_policy/trajectory_staleness/max"
_RUN_LIMIT_S = 1800.0

Row = dict[str, Any]  # a line of metrics.jsonl


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    ahead_name = f"prefetch {arguments.prefetch}"
    sides = {"sync": 0, ahead_name: arguments.prefetch}
    runs: dict[str, list[list[Row]]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory(prefix="verl-prefetch-") as scratch:
        folder = Path(scratch)
        common = overrides(arguments, folder)
        for number in range(arguments.rounds):
            for name, ahead in sides.items():
                changes = [*common, f"actor_rollout_ref.rollout.prefetch_num={ahead}"]
                threads = 1 if arguments.split else None
                runs[name].append(train(folder / f"{number}-{ahead}", changes, threads=threads))
    series = {name: Series(tuple(fmean(step_seconds(rows)) for rows in found)) for name, found in runs.items()}
    gained = ratio(series["sync"], series[ahead_name])
    rows = [(name, s.text("s"), f"{ratio(series['sync'], s):.2f}") for name, s in series.items()]
    oldest = oldest_sample(runs[ahead_name])
    print(table(("", "step", "times faster than sync"), rows))
    print(f"\nThe oldest sample that trained was {oldest} weight versions old; the bound is {arguments.prefetch}.")
    if arguments.json:
        figures = {name: s.to_json() for name, s in series.items()}
        found = {"ratio": gained, "oldest_sample": oldest, "bound": arguments.prefetch, "steps": figures}
        Path(arguments.json).write_text(json.dumps(found, indent=2) + "\n")
    return 0 if oldest <= arguments.prefetch else 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model folder (default: a tiny random one)")
    parser.add_argument("--split", action="store_true", help="train on one device, generate and score on another")
    parser.add_argument("--reward-seconds", type=float, default=0.5)
    parser.add_argument("--prefetch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=14, help="of each run, warm-up included")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--response-tokens", type=int, default=16)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a further key for both sides")
    parser.add_argument("--json", help="file for the figures")
    arguments = parser.parse_args(argv)
    if arguments.prefetch < 1 or arguments.steps < WARM_UP + 1 or arguments.rounds < 1:
        parser.error(f"at least --prefetch 1, --rounds 1 and --steps {WARM_UP + 1} are needed")
    return arguments


def overrides(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """The keys of both sides; writes the files that they name into `folder`."""
    from verl.models.tiny import make_tiny_model

    model = arguments.model or make_tiny_model(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    texts = [f"Say something about {i}." for i in range(arguments.prompts * arguments.steps)]
    write_prompts(folder / "train.jsonl", texts)
    return [
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={folder}/train.jsonl",
        f"data.val_files={folder}/train.jsonl",
        "trainer.val_before_train=False",
        f"data.train_batch_size={arguments.prompts}",
        "data.max_prompt_length=128",
        f"data.max_response_length={arguments.response_tokens}",
        f"actor_rollout_ref.rollout.n={arguments.samples}",
        "actor_rollout_ref.rollout.ignore_eos=True",
        # as many as samples are in flight, for both sides: the wait is measured, not a lack of scorers
        f"reward.num_workers={arguments.prompts * arguments.samples * (arguments.prefetch + 1)}",
        f"reward.custom_reward_function.path={folder}/reward.py",
        f"reward.custom_reward_function.reward_kwargs.seconds={arguments.reward_seconds}",
        "trainer.logger=[file]",
        f"trainer.total_training_steps={arguments.steps}",
        *(SPLIT if arguments.split else ()),
        *arguments.set,
    ]


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


def oldest_sample(runs: Sequence[Sequence[Mapping[str, Any]]]) -> int:
    """Weight versions between the oldest token that trained and the weights that trained on it, over all steps."""
    return max(int(row[_AGE]) for rows in runs for row in rows)


if __name__ == "__main__":
    raise SystemExit(main())
