"""Reward by samples, and time to a reward: GRPO of ours and of TRL on the main job's task with equal settings, on a CPU.

    python benchmarks/peers/learning_cpu.py --json results.json      # 20 steps of 16 prompts x 8 samples, seeds 1 and 2

Sides take steps in turns, so that a slow minute counts for both. Their rewards are of one function, their clocks of steps only.
"""

import argparse
import random
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peer import in_turns
from peers_cpu import MALLOC, TRLForm, add_trl_options, add_workload_options, model_of, start_trl, start_verl
from report import Report
from workload import Workload

# the loss of ours: a mean of tokens, no reference, advantages by the standard deviation
EQUAL = {"loss_type": "dapo", "beta": 0.0, "scale_rewards": "group", "weight_decay": 0.0}
TRL_FORMS = {"equal": TRLForm(16, {**EQUAL, "gradient_checkpointing": False}, MALLOC)}
_MEAN_OF = 3  # steps


def work_of(options: argparse.Namespace, seed: int) -> Workload:
    """Questions of the main job, in an order of the seed."""
    import pyarrow.parquet as parquet

    rows = parquet.read_table(options.data).to_pylist()
    drawn = random.Random(seed).choices(rows, k=(options.rounds + 1) * options.prompts)
    return Workload(
        str(model_of(options)), options.dtype, options.prompts, options.samples, prompt_tokens=128, response_tokens=16,
        num_steps=options.rounds + 1, learning_rate=options.learning_rate, seed=seed,
        prompts=tuple(row["prompt"][-1]["content"] for row in drawn),
        answers=tuple(str(row["reward_model"]["ground_truth"]) for row in drawn),
    )  # fmt: skip


def reached_s(steps: list[dict[str, float]], goal: float) -> float | None:
    """Seconds of the steps until the mean reward of three is `goal`."""
    for end in range(_MEAN_OF, len(steps) + 1):
        if statistics.fmean(step["reward"] for step in steps[end - _MEAN_OF : end]) >= goal:
            return sum(step["step_s"] for step in steps[:end])
    return None


def learn(options: argparse.Namespace, seed: int, logs: Path) -> dict[str, list[dict[str, float]]]:
    """Reward and seconds of every step of each side."""
    work, steps = work_of(options, seed), dict[str, list[dict[str, float]]]()
    with ExitStack() as stack:
        ours = [f"actor_rollout_ref.rollout.seed={seed}", *options.ours]
        peers = [start_verl(stack, work, logs, options.limit_s, ours)]
        if options.trl:
            peers.append(
                start_trl(stack, work.to_json(), logs, options, "equal", TRL_FORMS["equal"], work.num_sequences)
            )
        for number, answers in in_turns(peers, options.rounds, options.limit_s):
            for name, answer in answers.items():
                steps.setdefault(name, []).append({key: answer[key] for key in ("reward", "step_s")})
                print(f"seed {seed} step {number + 1} {name}:", steps[name][-1], file=sys.stderr, flush=True)
    return steps


def main(argv: list[str] | None = None) -> Report:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload_options(parser)
    add_trl_options(parser, TRL_FORMS, list(TRL_FORMS))
    parser.add_argument("--data", type=Path, default=Path("work/data/arithmetic/train.parquet"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--goal", type=float, default=0.5, help="mean reward of three steps to reach")
    parser.set_defaults(prompts=16, rounds=19)
    options = parser.parse_args(argv)
    report, rows = Report("Reward by samples, and time to a reward"), []
    with tempfile.TemporaryDirectory(prefix="learning-") as folder:
        for seed in options.seeds:
            steps = learn(options, seed, (options.logs or Path(folder)) / str(seed))
            reached = {name: reached_s(taken, options.goal) for name, taken in steps.items()}
            report.results[f"seed {seed}"] = {"steps": steps, "reached_s": reached}
            rows += [[seed, n, " ".join(f"{s['reward']:.2f}" for s in taken), reached[n]] for n, taken in steps.items()]
    samples = options.prompts * options.samples
    report.tables.append((["seed", "side", f"reward of each {samples} samples", f"seconds to {options.goal:g}"], rows))
    report.finish(options.json)
    return report


if __name__ == "__main__":
    main()
