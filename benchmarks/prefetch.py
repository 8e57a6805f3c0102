"""Samples made ahead of training against samples made right before it, with a reward that takes its time.

    python benchmarks/prefetch.py                       # reward of 0.5 s, prefetch 2, a tiny model made on the spot
    python benchmarks/prefetch.py --model FOLDER --steps 10 --reward-seconds 2 --prefetch 1 --json out.json

Both are whole runs of `verl train` on the same prompts; they alternate, and the ratio is that of the median seconds between two
finished steps (from metrics.jsonl), the first two steps left out. On one device generation and training do not overlap: what
is gained is the wait for the scores. With `--set KEY=VALUE` (for example actor_rollout_ref.rollout.nnodes=1)
rollout gets devices of its own, and generation is hidden as well.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from report import Series, ratio, table

_WARM_UP = 2
_REWARD = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None, seconds=0.5):
    time.sleep(seconds)
    return sum(c.isalpha() for c in solution_str) / max(len(solution_str), 1)
"""


def main() -> int:
    arguments = _parse()
    with tempfile.TemporaryDirectory(prefix="verl-prefetch-") as scratch:
        folder = Path(scratch)
        common = [*_overrides(arguments, folder), *arguments.set]
        sides = {"sync": 0, f"prefetch {arguments.prefetch}": arguments.prefetch}
        found: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(arguments.rounds):
            for name, ahead in sides.items():
                run = folder / f"{number}-{ahead}"
                found[name] += _step_seconds(run, [*common, f"actor_rollout_ref.rollout.prefetch_num={ahead}"])
    series = {name: Series(tuple(values)) for name, values in found.items()}
    gained = ratio(series["sync"], series[f"prefetch {arguments.prefetch}"])
    rows = [(name, s.text("s"), f"{ratio(series['sync'], s):.2f}") for name, s in series.items()]
    print(table(("", "step", "times faster than sync"), rows))
    if arguments.json:
        figures = {name: s.to_json() for name, s in series.items()}
        Path(arguments.json).write_text(json.dumps({"ratio": gained, "steps": figures}, indent=2) + "\n")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model folder (default: a tiny random one)")
    parser.add_argument("--reward-seconds", type=float, default=0.5)
    parser.add_argument("--prefetch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8, help="of each run, warm-up included")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--response-tokens", type=int, default=16)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a further key for both sides")
    parser.add_argument("--json", help="file for the figures")
    return parser.parse_args()


def _overrides(arguments: argparse.Namespace, folder: Path) -> list[str]:
    from verl.models.tiny import make_tiny_model

    model = arguments.model or make_tiny_model(folder / "model")
    (folder / "reward.py").write_text(_REWARD)
    count = arguments.prompts * arguments.steps
    rows = [
        {"data_source": "letters", "prompt": [{"role": "user", "content": f"Say something about {i}."}],
         "reward_model": {"style": "rule", "ground_truth": "letters"}}
        for i in range(count)
    ]  # fmt: skip
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
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
        # as many as samples are in flight, for both sides: what is measured is the wait, not a lack of scorers
        f"reward.num_workers={arguments.prompts * arguments.samples * (arguments.prefetch + 1)}",
        f"reward.custom_reward_function.path={folder}/reward.py",
        f"reward.custom_reward_function.reward_kwargs.seconds={arguments.reward_seconds}",
        "trainer.logger=[file]",
        f"trainer.total_training_steps={arguments.steps}",
    ]


def _step_seconds(run: Path, overrides: list[str]) -> list[float]:
    """Seconds between the rows of two steps that follow one another, after the warm-up."""
    command = [sys.executable, "-m", "verl", "train", *overrides, f"trainer.default_local_dir={run}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = [row["time"] for row in rows if row["step"] >= _WARM_UP]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


if __name__ == "__main__":
    raise SystemExit(main())
