"""Driver cost of a GRPO step against its samples. Engines are replaced by stand-ins, which return columns of the right shapes.

    python -m benchmarks.controller                              1,024 to 65,536 samples of 512 tokens, in one process
    python -m benchmarks.controller --samples 1024,16384 --tokens 4096
    python -m benchmarks.controller --workers 2                  the same over two Ray actors

Host, program, dispatch, ledger and files are those of `verl train`. Each size has a new process and is measured in its second
step: seconds of the main thread and of the clock, without the stand-ins; seconds until ledger and samples are on the disk after
it; the highest resident size, without the size before; bytes on the disk.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.runs import assigned, write_prompts
from verl.config import load_config
from verl.data_proto.merge import object_array
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.data_proto.token_values import token_keys
from verl.roles.rollout import sample_key
from verl.roles.updates import Updates
from verl.run.steps import SteppedRun
from verl.runtime import local

SAMPLES = (1_024, 4_096, 16_384, 65_536)
GROUP, PROMPT = 8, 64  # samples of a prompt, tokens of a prompt
_LIMIT_S = 540.0


class StandIns:
    """The workers of a rank without engines, in place of RankWorkers. Every response has the full length."""

    def __init__(self, context: Any, comm: object):
        self.width, self.weights, self.rollout = context.specs.rollout.section.response_length, self, None
        self.cpu_s = self.clock_s = 0.0

    def call(self, role: str, method: str, args: Any, kwargs: Any) -> Any:
        cpu, clock = time.thread_time(), time.perf_counter()
        result = getattr(self, f"{role}_{method}", dict)(*args, **kwargs)
        self.cpu_s, self.clock_s = self.cpu_s + time.thread_time() - cpu, self.clock_s + time.perf_counter() - clock
        return result

    def worker(self, role: str) -> Any:
        return type("Worker", (), {"__getattr__": lambda _, method: lambda *a, **k: self.call(role, method, a, k)})()

    def facts(self) -> dict[str, Any]:
        return {"device": "cpu"}

    def sync(self, version: int) -> None:
        self.version = version

    def close(self) -> None: ...

    def rollout_exact_log_probs(self) -> bool:
        return True

    def rollout_generate(self, prompts: DataProto, *, params: Any, split: str = "train", **_: object) -> DataProto:
        rows = prompts.repeat(params.n)
        n, exists = len(rows), torch.ones(len(rows), self.width, dtype=torch.bool)
        here = torch.ones(n, PROMPT, dtype=torch.bool)
        numbers, versions = torch.arange(n) % params.n, torch.full((n,), self.version)
        columns = {
            "prompts": torch.full((n, PROMPT), 7), "prompt_mask": here, "responses": torch.randint(5, 60, (n, self.width)),
            "response_mask": exists, "attention_mask": torch.cat([here, exists], dim=1),
            "rollout_log_probs": -torch.rand(n, self.width), "token_weight_version": versions[:, None].repeat(1, self.width),
            "sample_index": numbers, "weight_version": versions, "rollout_rank": torch.zeros(n, dtype=torch.int64),
        }  # fmt: skip
        pairs = zip(rows.batch["ordinal"].tolist(), numbers.tolist(), strict=True)
        keys = [sample_key(split, *pair) for pair in pairs]
        return DataProto.from_dict(
            columns, {"finish_reason": object_array(["stop"] * n), "sample_key": object_array(keys)}
        )

    def rollout_end_generation(self) -> dict[str, Metric]:
        return {}

    def reward_collect(self, batch: DataProto) -> DataProto:
        scores = torch.zeros(len(batch), self.width)
        scores[:, -1] = torch.rand(len(batch))
        objects = {
            "reward_parts": object_array([{"acc": 1.0}] * len(batch)),
            "reward_error": object_array([None] * len(batch)),
        }
        return DataProto.from_dict(
            {"token_level_scores": scores, "is_scored": torch.ones(len(batch), dtype=torch.bool)}, objects
        )

    def reward_num_defaulted(self, *_: object) -> int:
        return 0

    def actor_update(self, batch: DataProto, step: int, mini_batches: object) -> Updates:
        mask = batch.batch["response_mask"]
        sampled = batch.batch["rollout_log_probs"][mask]
        observed = [sampled + 0.01, sampled, *token_keys(batch, mask)]
        return Updates("actor", [{"pg_loss": Metric.mean(0.1), "grad_norm": Metric.mean(1.0)}], 1e-6, observed)


def stand_in_on_ray() -> None:
    """Ray actors make stand-ins too."""
    from verl.runtime import ray

    class StandInProcess(ray.RankProcess):
        def _build(self, *args: Any, **task: Any) -> dict[str, Any]:
            ray.RankWorkers = StandIns  # type: ignore[assignment, misc]
            return super()._build(*args, **task)

    ray.RankProcess = StandInProcess  # type: ignore[misc]


def keys(folder: Path, samples: int, tokens: int, workers: int) -> tuple[str, ...]:
    """Config keys of a run of a tiny model."""
    from verl.models.tiny import make_tiny_model

    write_prompts(folder / "rows.jsonl", [f"{i} + 1" for i in range(samples // GROUP)])
    (folder / "reward.py").write_text("def compute_score(*_, **__):\n    return 0.0\n")
    return assigned(
        {
            "algorithm.adv_estimator": "grpo", "actor_rollout_ref.model.path": make_tiny_model(folder / "model"),
            "actor_rollout_ref.rollout.n": GROUP, "actor_rollout_ref.actor.ppo_mini_batch_size": samples // GROUP,
            "data.train_files": folder / "rows.jsonl", "data.val_files": "[]", "data.train_batch_size": samples // GROUP,
            "data.max_prompt_length": PROMPT, "data.max_response_length": tokens,
            "reward.custom_reward_function.path": folder / "reward.py", "trainer.device": "cpu",
            "trainer.n_gpus_per_node": workers or 1, "ray_kwargs.ray_init.num_cpus": max(workers, 2),
            "trainer.page.enable": False, "trainer.logger": "[file]", "trainer.val_before_train": False,
            "trainer.total_training_steps": 4, "trainer.default_local_dir": folder / "run",
        }
    )  # fmt: skip


def measure(folder: Path, samples: int, tokens: int, workers: int) -> dict[str, float]:
    """Cost of the second step, in this process."""
    local.RankWorkers = StandIns  # type: ignore[assignment, misc]
    if workers:
        stand_in_on_ray()
    with SteppedRun(load_config(keys(folder, samples, tokens, workers))) as run:
        run.step()
        loop, _ = run._started()
        loop.tracker.flush()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the highest size counts from here
        there = getattr(getattr(loop.roles.end, "__self__", None), "workers", None)
        inside = (there.cpu_s, there.clock_s) if there else (0.0, 0.0)
        cpu, clock = time.thread_time(), time.perf_counter()
        run.step()
        cpu, clock = time.thread_time() - cpu, time.perf_counter() - clock
        cpu, clock = (cpu - there.cpu_s + inside[0], clock - there.clock_s + inside[1]) if there else (cpu, clock)
        began = time.perf_counter()
        loop.tracker.flush()
        loop.program.state_dict()
        row = {"driver_s": cpu, "clock_s": clock, "until_written_s": time.perf_counter() - began}
        num_bytes = sum(file.stat().st_size for file in (folder / "run").rglob("*") if file.is_file()) / 2
        return {**row, "peak_bytes": _resident("VmHWM") - before, "disk_bytes": num_bytes}


def _resident(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * float(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def main() -> None:
    parser = argparse.ArgumentParser(description="Driver cost of a step against its samples.")
    parser.add_argument("--samples", default=",".join(map(str, SAMPLES)))
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--workers", type=int, default=0, help="Ray actors; 0: one process")
    parser.add_argument("--here", action="store_true", help="measure one size in this process, and print JSON")
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.samples.split(",")]
    if arguments.here:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(Path(folder), sizes[0], arguments.tokens, arguments.workers)))
        return
    costs: dict[str, list[float]] = {}
    for size in sizes:
        options = ["--samples", str(size), "--tokens", str(arguments.tokens), "--workers", str(arguments.workers)]
        command = [sys.executable, "-m", "benchmarks.controller", "--here", *options]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=_LIMIT_S)
        for name, cost in json.loads(output.stdout.splitlines()[-1]).items():
            costs.setdefault(f"{name} a sample", []).append(cost / size)
        print(size, {name: row[-1] for name, row in costs.items()}, flush=True)
    from benchmarks.scale import table

    print(table(sizes, costs))


if __name__ == "__main__":
    main()
