"""Step times that the planner predicts for runs on this machine, against the runs, phase by phase.

    python benchmarks/planner.py                 # GRPO, PPO with a critic, SFT, and GRPO with a rollout of its own (needs ray)
    python benchmarks/planner.py --jobs grpo sft --steps 8 --json figures.json

The constants of the processor come from a micro-benchmark (verl/planner/cpu.py). What the engine costs beyond its kernels is
one factor for each kind of call (generation, forward, update), from a calibration job: GRPO with a smaller model and shorter
responses. The jobs that are compared take no part in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from prefetch import REWARD, SPLIT, train, write_prompts
from report import Report

from verl.models.tiny import make_tiny_model
from verl.planner import (
    Cluster,
    EngineLayout,
    Lengths,
    ModelShape,
    ParallelLayout,
    SequenceBatch,
    Workload,
    time_forward,
    time_generate,
    time_train,
)
from verl.planner.cpu import measure_cpu

WARM_UP = 3
# span of a step -> kind of call
SPANS = {"gen": "generate", "ref": "forward", "values": "forward", "update_actor": "train", "update_critic": "train"}


@dataclass(frozen=True)
class Job:
    """A run: sizes of its model, work of a step, and the spans that it has."""

    name: str
    hidden: int
    layers: int
    prompts: int
    samples: int
    response: int
    spans: tuple[str, ...]
    split: bool = False

    def model(self, folder: Path) -> Path:
        sizes = {"hidden_size": self.hidden, "intermediate_size": 3 * self.hidden, "num_hidden_layers": self.layers}
        return make_tiny_model(folder / f"model-{self.hidden}-{self.layers}", "qwen2", **sizes)


CALIBRATION = Job("calibration", 192, 3, 6, 4, 48, ("gen", "ref", "update_actor"))
JOBS = {
    "grpo": Job("grpo", 320, 5, 8, 4, 64, ("gen", "ref", "update_actor")),
    "ppo": Job("ppo", 320, 5, 8, 2, 64, ("gen", "values", "update_actor", "update_critic")),
    "sft": Job("sft", 320, 5, 16, 1, 64, ()),
    "async": Job("async", 320, 5, 8, 4, 64, (), split=True),
}


def measure(job: Job, folder: Path, steps: int) -> tuple[dict[str, float], SequenceBatch, float]:
    """Median seconds of each span and of the step, the rows that trained, and their mean prompt."""
    run, model = folder / job.name, job.model(folder)
    (folder / "reward.py").write_text(REWARD)
    if job.name == "sft":
        rows = train_sft(job, folder, run, model, steps)
    else:
        write_prompts(folder / f"{job.name}.jsonl", [f"Say something about {i}." for i in range(job.prompts * steps)])
        rows = train(run, keys(job, folder, model, steps), threads=1 if job.split else None)
    late = [row for row in rows if row["step"] > WARM_UP]
    found = {span: statistics.median(row[f"timing_s/{span}"] for row in late) for span in job.spans}
    found["step"] = statistics.median(row["timing_s/step"] for row in late)
    if job.split:  # batches that are made ahead come in bursts
        found["step"] = (rows[-1]["time"] - rows[WARM_UP - 1]["time"]) / (len(rows) - WARM_UP)
    prompt = statistics.median(row.get("prompt_length/mean", 0.0) for row in late)
    tokens = statistics.median(row["perf/total_num_tokens"] for row in late)
    num = job.prompts * job.samples
    return found, SequenceBatch.equal(num, tokens / num), prompt


def keys(job: Job, folder: Path, model: Path, steps: int) -> list[str]:
    estimator = "gae" if "values" in job.spans else "grpo"
    found = [
        f"algorithm.adv_estimator={estimator}",
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={folder / job.name}.jsonl",
        f"data.val_files={folder / job.name}.jsonl",
        "trainer.val_before_train=False",
        f"data.train_batch_size={job.prompts}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={job.prompts}",
        "data.max_prompt_length=128",
        f"data.max_response_length={job.response}",
        f"actor_rollout_ref.rollout.n={job.samples}",
        "actor_rollout_ref.rollout.ignore_eos=True",
        "actor_rollout_ref.actor.skip_zero_advantages=False",
        f"actor_rollout_ref.actor.use_kl_loss={'ref' in job.spans}",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        f"reward.custom_reward_function.path={folder}/reward.py",
        "reward.custom_reward_function.reward_kwargs.seconds=0",
        "reward.num_workers=1",
        "trainer.logger=[file]",
        f"trainer.total_training_steps={steps}",
    ]
    if estimator == "gae":
        found += [
            f"critic.model.path={model}",
            f"critic.ppo_mini_batch_size={job.prompts}",
            "critic.fsdp.dtype=float32",
        ]
    return [*found, *SPLIT, "actor_rollout_ref.rollout.prefetch_num=1"] if job.split else found


def train_sft(job: Job, folder: Path, run: Path, model: Path, steps: int) -> list[dict[str, Any]]:
    import subprocess

    turns = [("user", "Say it."), ("assistant", "x" * job.response)]
    row = {"messages": [{"role": role, "content": said} for role, said in turns]}
    rows = [row] * (job.prompts * steps)
    (folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        sys.executable, "-m", "verl", "sft", f"model.path={model}", f"data.train_files={folder}/sft.jsonl",
        f"data.train_batch_size={job.prompts}", "data.max_length=256", "engine.dtype=float32", "trainer.logger=[file]",
        f"trainer.total_training_steps={steps}", f"trainer.default_local_dir={run}",
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=900)
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if '"step": 0' not in line]


def predict(job: Job, cluster: Cluster, model: Path, batch: SequenceBatch, prompt: float) -> dict[str, float]:
    """Seconds of each kind of call by the kernels alone."""
    shape = ModelShape.from_config(json.loads((model / "config.json").read_text()))
    layout = ParallelLayout(zero=0, micro_batch=16384)
    found = {
        "forward": time_forward(shape, layout, cluster, batch).seconds,
        "train": time_train(shape, layout, cluster, batch).seconds,
    }
    if prompt:
        work = Workload(job.prompts, job.samples, prompt, Lengths.constant(job.response))
        found["generate"] = time_generate(shape, EngineLayout(1, slots=256), cluster, work).seconds
    return found


def compare(
    job: Job, measured: Mapping[str, float], kernels: Mapping[str, float], factors: Mapping[str, float]
) -> list[tuple[str, float, float]]:
    """(phase, predicted, measured) of a job, the whole step last."""
    predicted = {span: kernels[SPANS[span]] * factors[SPANS[span]] for span in job.spans}
    if job.name == "sft":
        total = kernels["train"] * factors["train"]
    elif job.split:
        total = max(kernels["generate"] * factors["generate"], kernels["train"] * factors["train"])
    else:
        total = sum(predicted.values())
    return [*((span, predicted[span], measured[span]) for span in job.spans), ("step", total, measured["step"])]


def main(argv: Sequence[str] | None = None) -> Report:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="*", choices=sorted(JOBS), default=list(JOBS))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    report = Report("Predicted and measured step times on this processor")
    with tempfile.TemporaryDirectory(prefix="verl-planner-") as scratch:
        folder = Path(scratch)
        whole, half = measure_cpu(16e9), measure_cpu(16e9, threads=1)
        measured, batch, prompt = measure(CALIBRATION, folder, options.steps)
        kernels = predict(CALIBRATION, whole, CALIBRATION.model(folder), batch, prompt)
        factors = {SPANS[span]: measured[span] / kernels[SPANS[span]] for span in CALIBRATION.spans}
        report.facts["measured / kernels, from the calibration job"] = {k: round(v, 2) for k, v in factors.items()}
        for name in options.jobs:
            job = JOBS[name]
            measured, batch, prompt = measure(job, folder, options.steps)
            kernels = predict(job, half if job.split else whole, job.model(folder), batch, prompt)
            rows = compare(job, measured, kernels, factors)
            cells = [[p, f"{1e3 * a:.1f}", f"{1e3 * b:.1f}", f"{a / b - 1:+.0%}"] for p, a, b in rows]
            report.add_table([name, "predicted ms", "measured ms", "error"], cells)
            report.results[name] = {p: {"predicted_s": a, "measured_s": b} for p, a, b in rows}
    report.finish(options.json)
    return report


if __name__ == "__main__":
    main()
