"""Step times and peak memory that the planner predicts for runs on this machine, against the runs, phase by phase.

    python benchmarks/planner/planner.py --keep runs.json --measure calibration     # in parts: each run is made once and kept
    python benchmarks/planner/planner.py --keep runs.json --measure grpo sft
    python benchmarks/planner/planner.py --keep runs.json                           # the missing runs, and the tables

Jobs: GRPO, PPO with a critic, SFT, and GRPO with a separate rollout that runs a step ahead (needs ray). A device is a process
that computes with one thread. The constants of its kernels come from a micro-benchmark (verl/planner/cpu.py). The constants of
the engine come from calibration runs with other models and lengths: for each kind of call a factor of the kernels, seconds per
layer and seconds per pass. Of the memory, only the bytes of a process without a model are calibrated.

Seconds are medians over the steps, without the time in which the process was ready and other processes had the cores; the share
of that time is printed (`waited`). Where it is not small, caches and memory were shared as well, and results are too high.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from report import Report
from runs import REWARD, train, write_prompts
from watch import Watch

from verl.models.tiny import make_tiny_model
from verl.planner import (
    Cluster,
    EngineLayout,
    Lengths,
    ModelShape,
    ParallelLayout,
    Workload,
    generation_memory,
    memory,
    time_forward,
    time_generate,
    time_train,
)
from verl.planner.cluster import device_from
from verl.planner.cpu import CallMeasured, calibrated, fit_call, measure_cpu
from verl.planner.memory import FLOAT32, training_state
from verl.rollout.cpu.library import state as decoding_kernels

WARM_UP = 3
SPLIT = (
    "trainer.n_gpus_per_node=2",
    "trainer.placement={actor:[0],rollout:[1],reward:[1]}",
    "ray_kwargs.ray_init.num_cpus=2",
    "actor_rollout_ref.rollout.prefetch_num=1",
)
LIMIT_S = 900
PROMPT = 42.0  # tokens, with the chat template
# span of a step -> kind of call
SPANS = {
    "gen": "generate",
    "ref": "forward",
    "values": "forward",
    "update_actor": "train",
    "update_critic": "train",
    "update": "train",
}
LAYOUT = ParallelLayout(zero=0, recompute="full", micro_batch=16384)
Figures = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A run: sizes of its model, work of a step, and the spans that it has."""

    name: str
    hidden: int
    layers: int
    prompts: int
    samples: int
    response: int
    spans: tuple[str, ...] = ("gen", "ref", "update_actor")
    split: bool = False

    @property
    def work(self) -> Workload:
        lengths = Lengths.constant(self.response)
        return Workload(self.prompts, self.samples, PROMPT, lengths, shares_prompts=True)

    def model(self, folder: Path) -> Path:
        sizes = {"hidden_size": self.hidden, "intermediate_size": 3 * self.hidden, "num_hidden_layers": self.layers}
        return make_tiny_model(folder / f"model-{self.hidden}-{self.layers}", "qwen2", **sizes)

    def shape(self) -> ModelShape:
        return ModelShape(self.layers, self.hidden, 4, 2, self.hidden // 4, 3 * self.hidden, 264, tied=True)


CALIBRATION = (
    Job("small", 128, 2, 6, 4, 48),
    Job("deep", 192, 8, 6, 4, 48),
    Job("wide", 448, 3, 4, 4, 96),
    Job("many", 256, 4, 8, 8, 48),
    Job("small sft", 192, 3, 8, 1, 48, ("update",)),
    Job("small async", 192, 3, 6, 4, 48, (), split=True),
)
JOBS = (
    Job("grpo", 320, 5, 8, 4, 64),
    Job("ppo", 320, 5, 8, 2, 64, ("gen", "values", "update_actor", "update_critic")),
    Job("sft", 320, 5, 16, 1, 64, ("update",)),
    Job("async", 320, 5, 8, 4, 64, (), split=True),
)


# -- runs


def measure(job: Job, folder: Path, steps: int) -> Figures:
    """Median seconds of each span and of the step, the peak memory of each process that computes, and the share of a step
    for which it waited for a core."""
    run, model = folder / job.name.replace(" ", "-"), job.model(folder)
    (folder / "reward.py").write_text(REWARD)
    with Watch() as watch:
        rows = (
            train_sft(job, folder, run, model, steps)
            if "update" in job.spans
            else train_rl(job, folder, run, model, steps)
        )
    ranks = watch.largest(2 if job.split else 1)
    late = [row for row in rows if row["step"] > WARM_UP]
    timeline = read(run / "timeline.jsonl")
    waits = {r["step"]: min(watch.waited(p, r["start"], r["start"] + r["seconds"]) for p in ranks) for r in timeline}
    spans = [s for s in read(run / "spans.jsonl") if s["step"] > WARM_UP]
    figures: Figures = {
        "peaks": [watch.peaks[pid] for pid in ranks],
        "tokens": statistics.median(row["perf/total_num_tokens"] for row in late),
        "waited": statistics.median(waits[row["step"]] / row["timing_s/step"] for row in late),
        "load": os.getloadavg()[0],
    }
    for name in job.spans:
        by_step = dict.fromkeys((row["step"] for row in late), 0.0)
        for s in spans:
            if s["name"] == name:
                by_step[s["step"]] += s["seconds"] - watch.waited(ranks[0], s["start"], s["start"] + s["seconds"])
        figures[name] = statistics.median(by_step.values())
    if job.split:  # batches that are made ahead come in bursts; the side that never waits for the other decides
        start, end = rows[WARM_UP - 1]["time"], rows[-1]["time"]
        figures["step"] = (end - start - min(watch.waited(pid, start, end) for pid in ranks)) / len(late)
    else:
        figures["step"] = statistics.median(row["timing_s/step"] - waits[row["step"]] for row in late)
    return figures


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def train_rl(job: Job, folder: Path, run: Path, model: Path, steps: int) -> list[dict[str, Any]]:
    write_prompts(folder / f"{job.name}.jsonl", [f"Say something about {i}." for i in range(job.prompts * steps)])
    return train(run, keys(job, folder, model, steps), threads=1)


def keys(job: Job, folder: Path, model: Path, steps: int) -> list[str]:
    estimator = "gae" if "values" in job.spans else "grpo"
    settings = [
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
        settings += [
            f"critic.model.path={model}",
            f"critic.ppo_mini_batch_size={job.prompts}",
            "critic.fsdp.dtype=float32",
        ]
    return [*settings, *SPLIT] if job.split else settings


def train_sft(job: Job, folder: Path, run: Path, model: Path, steps: int) -> list[dict[str, Any]]:
    asked = [f"Say something about {i}." for i in range(job.prompts * steps)]
    turns = [[("user", text), ("assistant", "x" * job.response)] for text in asked]
    rows = [{"messages": [{"role": role, "content": said} for role, said in row]} for row in turns]
    (folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        sys.executable, "-m", "verl", "sft", f"model.path={model}", f"data.train_files={folder}/sft.jsonl",
        f"data.train_batch_size={job.prompts}", "data.max_length=256", "engine.dtype=float32", "trainer.logger=[file]",
        f"trainer.total_training_steps={steps}", f"trainer.default_local_dir={run}",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_S, env=environment)
    return [row for row in read(run / "metrics.jsonl") if row["step"] > 0]


# -- predictions


def call_seconds(job: Job, cluster: Cluster) -> dict[str, float]:
    """Seconds of each kind of call."""
    shape, work = job.shape(), job.work
    return {
        "generate": time_generate(shape, EngineLayout(1, slots=256), cluster, work).seconds,
        "forward": time_forward(shape, LAYOUT, cluster, work.batch).seconds,
        "train": time_train(shape, LAYOUT, cluster, work.batch).seconds,
    }


def calibrate(cluster: Cluster, runs: Mapping[str, Figures]) -> Cluster:
    """The cluster with constants of calls from the phases of the calibration runs."""
    calls: dict[str, list[CallMeasured]] = {}
    for job in CALIBRATION:
        kernels = call_seconds(job, cluster)
        for span in job.spans:
            kind = SPANS[span]
            passes = job.response if kind == "generate" else 1
            calls.setdefault(kind, []).append(CallMeasured(kernels[kind], job.layers, passes, runs[job.name][span]))
    return calibrated(cluster, {kind: fit_call(measured) for kind, measured in calls.items()})


def rest(job: Job, runs: Mapping[str, Figures]) -> float:
    """Seconds of a step outside its phases, for each sample as in the calibration runs of its program."""
    alike = [c for c in CALIBRATION if not c.split and ("update" in c.spans) == ("update" in job.spans)]
    each = [(runs[c.name]["step"] - sum(runs[c.name][s] for s in c.spans)) / c.work.num_samples for c in alike]
    return max(0.0, statistics.median(each)) * job.work.num_samples


def predict(job: Job, cluster: Cluster, runs: Mapping[str, Figures]) -> dict[str, float]:
    """Seconds of each span, and of the step."""
    calls = call_seconds(job, cluster)
    if job.split:
        return {"step": max(calls["generate"], calls["forward"] + calls["train"]) + rest(job, runs)}
    seconds = {span: calls[SPANS[span]] for span in job.spans}
    return {**seconds, "step": sum(seconds.values()) + rest(job, runs)}


def model_bytes(job: Job) -> float:
    """Peak bytes of the models and their computation, in the processes of a job."""
    shape, work = job.shape(), job.work
    trained = memory(shape, LAYOUT, tokens=work.batch.tokens, sequence=work.batch.attended, width=FLOAT32)
    total = trained.total
    if "update" in job.spans:
        return total
    engine = generation_memory(shape, EngineLayout(1, slots=256), work, FLOAT32)
    total += engine.weights + engine.kv  # a copy of the weights that multiplies faster, and the cache
    if job.split:
        total += engine.weights  # of the rollout's own module
    if "values" in job.spans:
        total += training_state(shape, LAYOUT, None, FLOAT32).total
    if "ref" in job.spans or job.split:
        total += FLOAT32 * shape.num_parameters
    return total


def process_bytes(split: bool, runs: Mapping[str, Figures]) -> float:
    """Bytes of the processes without a model."""
    return statistics.median(sum(runs[c.name]["peaks"]) - model_bytes(c) for c in CALIBRATION if c.split == split)


# -- the report


def main(argv: Sequence[str] | None = None) -> Report | None:
    names = [job.name for job in (*CALIBRATION, *JOBS)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", nargs="*", choices=[*names, "calibration"], help="only make these runs")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--keep", type=Path, required=True, help="file of the runs that were made")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    chosen = options.measure or names
    chosen = [n for name in chosen for n in ([c.name for c in CALIBRATION] if name == "calibration" else [name])]
    runs = json.loads(options.keep.read_text()) if options.keep.exists() else {}
    with tempfile.TemporaryDirectory(prefix="verl-planner-") as scratch:
        for name, make in runs_to_make(chosen, Path(scratch), options.steps):
            if name not in runs or options.measure:
                runs[name] = make()
                options.keep.write_text(json.dumps(runs, indent=1) + "\n")
    if options.measure:
        return None
    report = compare(runs)
    report.finish(options.json)
    return report


def runs_to_make(names: Sequence[str], folder: Path, steps: int) -> list[tuple[str, Callable[[], Figures]]]:
    runs: list[tuple[str, Callable[[], Figures]]] = []
    if any(job.name in names for job in CALIBRATION):
        runs.append(("device", lambda: asdict(measure_cpu(16e9, threads=1).device)))
    for job in (*CALIBRATION, *JOBS):
        if job.name in names:
            runs.append((job.name, lambda job=job: measure(job, folder, steps)))
    return runs


def compare(runs: Mapping[str, Figures]) -> Report:
    report = Report("Predicted and measured step times and peak memory on this processor, one thread a process")
    cluster = calibrate(Cluster(device_from(runs["device"], "cpu"), 1, 1, 1, 1e9, 1e9), runs)
    for kind, fit in cluster.device.kernels.calls.items():
        text = f"{fit.factor:.2f} x kernels + {1e3 * fit.call_s:.2f} ms a pass + {1e3 * fit.layer_s:.2f} ms a layer"
        report.facts[kind] = text
    report.facts["decoding"] = decoding_kernels()["name"] or "by torch: the compiled kernels are missing"
    report.facts["process without a model, MB"] = [round(process_bytes(split, runs) / 1e6) for split in (False, True)]
    for job in (*CALIBRATION, *JOBS):
        measured, predicted = runs[job.name], predict(job, cluster, runs)
        size, peak = process_bytes(job.split, runs) + model_bytes(job), sum(measured["peaks"])
        rows = [[phase, *cells(1e3 * seconds, 1e3 * measured[phase], "ms")] for phase, seconds in predicted.items()]
        rows.append(["peak memory", *cells(size / 1e6, peak / 1e6, "MB")])
        about = "calibration" if job in CALIBRATION else f"waited {measured['waited']:.0%}"
        report.add_table([f"{job.name} ({about})", "predicted", "measured", "error"], rows)
        report.results[job.name] = {"predicted": {**predicted, "bytes": size}, "measured": measured}
    return report


def cells(predicted: float, measured: float, unit: str) -> list[str]:
    return [f"{predicted:.1f} {unit}", f"{measured:.1f} {unit}", f"{predicted / measured - 1:+.1%}"]


if __name__ == "__main__":
    main()
