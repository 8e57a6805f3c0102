"""Seconds and steps until the held-out sampled reward first reaches a target, ours and TRL's, on the same job.

    python benchmarks/peers/time_to_reward.py                               # ours in three precisions, TRL as shipped
    python benchmarks/peers/time_to_reward.py --sides dithered "trl shipped" "trl best" --json results.json
    python benchmarks/peers/time_to_reward.py --sides float32 nearest dithered --seeds 1 2 3 --all-steps # 20 steps

The job is a YAML file of `verl train`. Both sides get its prompts in the same order, its reward function and its
hyperparameters; prompts are compared token by token in every step. One evaluator of ours rates both: the same held-out
prompts, sampler settings and random numbers, at the same steps; its time and the time to build a side do not count.
Sides run one after the other, never at the same time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peer import Peer
from peer_env import ROOT, default_folder, ensure, python_of
from peers_cpu import TRL_FORMS, Unequal, typed
from report import Report, number

_DTYPE = "actor_rollout_ref.actor.fsdp_config.dtype"
_ROUNDING = "actor_rollout_ref.actor.fsdp_config.master_rounding"
OURS = {
    "float32": [f"{_DTYPE}=float32"],
    "nearest": [f"{_DTYPE}=bfloat16", f"{_ROUNDING}=nearest"],
    "dithered": [f"{_DTYPE}=bfloat16", f"{_ROUNDING}=dithered"],
}
TRL = {f"trl {form}": form for form in TRL_FORMS}


@dataclass
class Point:
    """The held-out reward after a step. `seconds` is the time of all steps so far."""

    step: int
    seconds: float
    sampled: float
    greedy: float | None


@dataclass
class Run:
    """One side with one seed."""

    side: str
    seed: int
    points: list[Point] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    build_s: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)

    def reached(self, target: float) -> Point | None:
        """The first evaluation at or above `target`."""
        return next((p for p in self.points if p.sampled >= target), None)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--config",
        type=Path,
        default=ROOT / "verl/config/yaml/grpo_smollm2.yaml",
        help="the job, a file of `verl train`",
    )
    add("--ours", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of the job, for both sides")
    add("--sides", nargs="+", choices=[*OURS, *TRL], default=[*OURS, "trl shipped"])
    add("--seeds", type=int, nargs="+", default=[1], help="of the order of prompts and of sampling")
    add("--target", type=float, default=0.5, help="held-out sampled reward")
    add("--steps", type=int, default=20, help="most steps of a side")
    add("--every", type=int, default=2, help="steps between two evaluations")
    add("--all-steps", action="store_true", help="continue to --steps when the target is reached")
    add("--trl-dtype", choices=("float32", "bfloat16", "mixed"), default="float32", help="see child_trl_job.py")
    add("--trl-env", type=Path, help="TRL's environment (made if absent; default under work/)")
    add("--trl-set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of every form's config")
    add("--trl-micro-batch", type=int, help="samples in a micro-batch of every form of TRL")
    add("--limit-s", type=float, default=1800.0, help="longest wait for one step of one side")
    add("--logs", type=Path, help="folder for the processes' output and weights (default: a temporary one)")
    add("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser.parse_args(argv)


def overrides_of(options: argparse.Namespace, seed: int, folder: Path) -> list[str]:
    """The job's overrides for one seed, relative to the file of the job."""
    mine = {
        "data.seed": seed,
        "actor_rollout_ref.rollout.seed": seed,
        "trainer.total_training_steps": options.steps,
        "trainer.default_local_dir": folder,
    }
    return [*(f"{key}={value}" for key, value in mine.items()), *options.ours]


def environment() -> dict[str, str]:
    """For processes of ours that another environment starts."""
    return {k: os.environ[k] for k in ("PYTHONPATH", "HF_HUB_OFFLINE") if k in os.environ}


def train(run: Run, options: argparse.Namespace, peer: Peer, evaluate: Callable[[], dict[str, Any]]) -> None:
    """Steps and evaluations of one side until the target or the last step."""
    seconds = 0.0
    for step in range(options.steps + 1):
        if step:
            answer = peer.ask("step", options.limit_s)
            run.steps.append(answer)
            seconds += answer["step_s"]
        if step % options.every and step != options.steps:
            continue
        rewards = evaluate()
        run.points.append(Point(step, seconds, rewards["sampled"], rewards["greedy"]))
        note = f"step {step}: {seconds:.1f} s, held-out reward {rewards['sampled']:.3f}"
        print(f"{run.side}, seed {run.seed}, {note}", file=sys.stderr, flush=True)
        if run.reached(options.target) and not options.all_steps:
            return


def run_ours(options: argparse.Namespace, side: str, seed: int, logs: Path) -> Run:
    """A run of ours, evaluated by its own process."""
    run = Run(side, seed)
    name = f"{side}-{seed}"
    overrides = [*overrides_of(options, seed, logs / name), *OURS[side]]
    with Peer(side, "child_job.py", log=logs / f"{name}.log") as peer:
        started = time.monotonic()
        peer.build(options.limit_s, config=str(options.config.resolve()), overrides=overrides)
        run.build_s, run.facts = time.monotonic() - started, peer.facts
        train(run, options, peer, lambda: peer.ask("evaluate", options.limit_s))
    return run


def run_trl(options: argparse.Namespace, side: str, seed: int, logs: Path) -> Run:
    """A run of TRL. At each evaluation its weights are saved, and a process of ours rates them."""
    run, form = Run(side, seed), TRL_FORMS[TRL[side]]
    name = f"{side.replace(' ', '-')}-{seed}"
    ours = {"config": str(options.config.resolve()), "overrides": overrides_of(options, seed, logs / name)}
    with Peer("job", "child_job.py", log=logs / f"{name}-job.log") as reader:
        job = reader.ask("job", options.limit_s, num_steps=options.steps, **ours)
    model = Path(job["model"]).resolve()
    number_of_rows = job["num_prompts"] * job["num_samples"]
    weights = logs / f"{name}-weights"

    def evaluate() -> dict[str, Any]:
        if run.steps:
            peer.ask("save", options.limit_s, folder=str(weights))
            for file in model.iterdir():  # the tokenizer and config with which our side trains
                if file.is_file() and file.suffix not in (".safetensors", ".bin", ".pt"):
                    shutil.copyfile(file, weights / file.name)
        with Peer("evaluator", "child_job.py", log=logs / f"{name}-evaluator.log") as evaluator:
            dtype = "bfloat16" if options.trl_dtype == "bfloat16" else "float32"
            folder = str(weights if run.steps else model)
            rewards = evaluator.ask("evaluate_folder", options.limit_s, folder=folder, dtype=dtype, **ours)
        shutil.rmtree(weights, ignore_errors=True)
        return rewards

    python = python_of(options.trl_env or default_folder("trl"))
    settings = {"HF_HUB_OFFLINE": "1", **form.environment}
    with Peer(side, "child_trl_job.py", log=logs / f"{name}.log", python=python, environment=settings) as peer:
        started = time.monotonic()
        peer.build(
            options.limit_s,
            job={**job, "model": str(model)},
            dtype=options.trl_dtype,
            micro_batch=min(options.trl_micro_batch or form.micro_batch, number_of_rows),
            settings={**form.settings, **dict(typed(text) for text in options.trl_set)},
            folder=str(logs / name),
            scorer={"python": sys.executable, "environment": environment(), **ours},
        )
        run.build_s, run.facts = time.monotonic() - started, peer.facts
        train(run, options, peer, evaluate)
    check_same_prompts(run, job["digests"], number_of_rows)
    return run


def check_same_prompts(run: Run, digests: list[str], num_sequences: int) -> None:
    """Raise Unequal unless every step of `run` took the prompts of the job."""
    for step, (answer, expected) in enumerate(zip(run.steps, digests, strict=False), start=1):
        if answer["prompts"] != expected or answer["num_sequences"] != num_sequences:
            raise Unequal(
                f"{run.side} took other prompts in step {step} than the job has; the runs cannot be compared."
            )


def fill(report: Report, runs: list[Run], target: float) -> None:
    """Tables: time to the target, rewards over steps, and the last rewards next to float32's."""
    sides = list(dict.fromkeys(run.side for run in runs))
    of_side = {side: [run for run in runs if run.side == side] for side in sides}
    baseline = next((side for side in ("dithered", "float32", "nearest") if side in of_side), sides[0])
    times = {side: [p and p.seconds for p in (run.reached(target) for run in of)] for side, of in of_side.items()}
    rows = []
    for side, of in of_side.items():
        points = [run.reached(target) for run in of]
        met = [p for p in points if p is not None]
        whole = len(met) == len(points)
        ratios = [t / b for t, b in zip(times[side], times[baseline], strict=False) if t and b]
        rows.append(
            [
                side,
                f"{len(met)} of {len(points)}",
                number(median(p.step for p in met)) if whole else "-",
                f"{number(median(p.seconds for p in met))} s" if whole else "-",
                f"{number(median(ratios))}x" if whole and ratios else "-",
                f"{number(mean(a['step_s'] for run in of for a in run.steps))} s" if any(r.steps for r in of) else "-",
                number(mean(run.points[-1].sampled for run in of)),
            ]
        )
    report.add_table(
        ["side", f"reached {target:g}", "steps", "seconds", f"ratio to {baseline}", "per step", "last reward"], rows
    )
    curves = [
        [f"{run.side}, seed {run.seed}", " ".join(f"{p.step}:{p.sampled:.3f}" for p in run.points)] for run in runs
    ]
    report.add_table(["held-out sampled reward", "step:reward"], curves)
    gaps = gaps_to_float32(of_side)
    if gaps:
        report.add_table(
            ["after the last common step", "less float32's, by seed", "mean"],
            [[side, " ".join(f"{gap:+.3f}" for gap in diffs), f"{mean(diffs):+.3f}"] for side, diffs in gaps.items()],
        )
    report.results = {
        "target": target,
        "baseline": baseline,
        "seconds_to_target": times,
        "gaps_to_float32": gaps,
        "runs": [asdict(run) for run in runs],
    }


def gaps_to_float32(of_side: dict[str, list[Run]]) -> dict[str, list[float]]:
    """Sampled reward minus float32's with the same seed, after the last step at which both were evaluated."""
    exact = {run.seed: {p.step: p.sampled for p in run.points} for run in of_side.get("float32", [])}
    gaps: dict[str, list[float]] = {}
    for side, runs in of_side.items():
        for run in runs:
            common = [p for p in run.points if p.step in exact.get(run.seed, {})] if side != "float32" else []
            if common:
                gaps.setdefault(side, []).append(common[-1].sampled - exact[run.seed][common[-1].step])
    return gaps


def report_of(options: argparse.Namespace, runs: list[Run]) -> Report:
    report = Report(f"Time to a held-out reward of {options.target:g}")
    report.facts = {"job": options.config.name, "most steps": options.steps, "evaluated every": options.every}
    report.facts.update({run.side: run.facts for run in runs})
    fill(report, runs, options.target)
    report.notes.append("Seconds are those of training steps; building a side and evaluating it do not count.")
    return report


def main(argv: list[str] | None = None) -> Report:
    options = parse(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if set(options.sides) & set(TRL):
        ensure("trl", options.trl_env)
    runs: list[Run] = []
    with ExitStack() as stack:
        logs = options.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="reward-")))
        for seed in options.seeds:
            for side in dict.fromkeys(options.sides):
                runs.append((run_ours if side in OURS else run_trl)(options, side, seed, logs.resolve()))
                report = report_of(options, runs)
                report.write(options.json)  # after every run, since each takes minutes
    report.show()
    return report


if __name__ == "__main__":
    main()
