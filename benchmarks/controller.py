"""Driver cost of a GRPO step against its samples. Engines are replaced by stand-ins, which return columns of the right shapes.

    python -m benchmarks.controller                              1,024 to 65,536 samples of 512 tokens
    python -m benchmarks.controller --ranks 2                    on Ray

Host, program, dispatch, ledger and files are the same as in `verl train`. The second step is measured: seconds of the main
thread without the stand-ins; seconds until ledger and samples are on the disk after it; the growth of the process's own memory
at its highest, without the object store of Ray; bytes on the disk. A line through several sizes tells the cost of a further
sample from what is there whatever their number. In one process the memory includes the columns of the ranks.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from verl.parallel.process_settings import imports_stay, keep_freed_memory

with imports_stay():  # collections of garbage pass over what is imported here, as in `verl train`
    import verl.run.host  # noqa: F401

import numpy as np
import torch

from benchmarks.scale import Costs, overrides, timed
from verl.config import load_config
from verl.data_proto.merge import object_array
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.data_proto.token_values import token_keys
from verl.models.tiny import make_tiny_model
from verl.programs.api import ProgramSpecs, specs_of_recipe
from verl.roles.updates import Updates
from verl.run.host import SteppedRun
from verl.runtime import local

GROUP, PROMPT = 8, 64  # samples of a prompt, tokens of a prompt


class StandIns:
    """The workers of a rank without engines, in place of RankWorkers. Every response has the full length."""

    def __init__(self, context: Any, comm: object):
        self.width, self.weights, self.seconds = context.specs.rollout.section.response_length, self, 0.0
        self.rank = context.rank

    def call(self, role: str, method: str, args: Any, kwargs: Any) -> Any:
        start = time.thread_time()
        result = getattr(self, f"{role}_{method}")(*args, **kwargs)
        self.seconds += time.thread_time() - start
        return result

    def worker(self, role: str) -> SimpleNamespace:
        return SimpleNamespace(collect=self.reward_collect, num_defaulted=self.reward_num_defaulted)

    def __getattr__(self, name: str) -> Any:
        answers = {"facts": {"device": "cpu"}, "rollout_exact_log_probs": True, "reward_num_defaulted": 0}
        return lambda *_: answers.get(name, {})

    def sync(self, version: int) -> None:
        self.version = version

    def rollout_generate(self, prompts: DataProto, *, params: Any, split: str = "train", **_: object) -> DataProto:
        rows = prompts.repeat(params.n)
        n, here = len(rows), torch.ones(len(rows), PROMPT + self.width, dtype=torch.bool)
        numbers, versions = torch.arange(n) % params.n, torch.full((n,), self.version)
        columns = {
            "prompts": torch.full((n, PROMPT), 7), "prompt_mask": here[:, :PROMPT].clone(), "attention_mask": here,
            "responses": torch.randint(5, 60, (n, self.width)), "response_mask": here[:, PROMPT:].clone(),
            "rollout_log_probs": -torch.rand(n, self.width), "token_weight_version": versions[:, None].repeat(1, self.width),
            "sample_index": numbers, "weight_version": versions, "rollout_rank": torch.full((n,), self.rank),
        }  # fmt: skip
        names = {"finish_reason": ["stop"] * n, "sample_split": [split] * n}
        return DataProto.from_dict(columns, {name: object_array(values) for name, values in names.items()})

    def reward_collect(self, batch: DataProto) -> DataProto:
        n, scores = len(batch), torch.zeros(len(batch), self.width)
        scores[:, -1] = torch.rand(n)
        objects = {"reward_parts": object_array([{"acc": 1.0}] * n), "reward_error": object_array([None] * n)}
        columns = {"token_level_scores": scores, "is_scored": torch.ones(n, dtype=torch.bool)}
        return DataProto.from_dict(columns, objects)

    def actor_update(self, batch: DataProto, step: int, mini_batches: object) -> Updates:
        mask = batch.batch["response_mask"]
        sampled = batch.batch["rollout_log_probs"][mask]
        observed = [sampled + 0.01, sampled, *token_keys(batch, mask)]
        return Updates("actor", [{"pg_loss": Metric.mean(0.1), "grad_norm": Metric.mean(1.0)}], 1e-6, observed)


def stand_in_specs(*recipe: Any) -> ProgramSpecs:
    """The specs of a rank's process on Ray, with stand-ins in it."""
    vars(import_module("verl.runtime.ray"))["RankWorkers"] = StandIns
    return specs_of_recipe(*recipe)


def measure(folder: Path, samples: int, tokens: int, ranks: int) -> dict[str, float]:
    shared = {"data_source": "letters", "reward_model": {"style": "rule", "ground_truth": "letters"}}
    rows = [{**shared, "prompt": [{"role": "user", "content": f"{i} + 1"}]} for i in range(samples // GROUP)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {
        "actor_rollout_ref.rollout.n": GROUP, "actor_rollout_ref.actor.ppo_mini_batch_size": samples // GROUP,
        "data.train_batch_size": samples // GROUP, "data.max_prompt_length": PROMPT, "data.max_response_length": tokens,
        "trainer.total_training_steps": 4, "trainer.default_local_dir": folder / "run", "trainer.n_gpus_per_node": ranks,
    }  # fmt: skip
    if ranks > 1:  # without spilling to the disk
        changes["+ray_kwargs.ray_init.object_store_memory"] = max(1 << 30, 48 * samples * tokens)
    keys = overrides(make_tiny_model(folder / "model"), folder, folder / "rows.jsonl")
    with SteppedRun(load_config([*keys, *(f"{key}={value}" for key, value in changes.items())])) as run:
        run.step()
        loop, _ = run._started()
        loop.tracker.flush()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        workers = getattr(loop.roles.end.__self__, "workers", None) or SimpleNamespace(seconds=0.0)
        with own_memory() as sizes:
            start = time.thread_time() - workers.seconds
            run.step()
            row = {"driver_s": time.thread_time() - workers.seconds - start}
            row["until_written_s"] = timed(lambda: (loop.tracker.flush(), loop.program.state_dict()))[0]
        num_bytes = sum(file.stat().st_size for file in (folder / "run").rglob("*") if file.is_file()) / 2
        return {**row, "peak_bytes": max(sizes) - sizes[0], "disk_bytes": num_bytes}


@contextmanager
def own_memory() -> Iterator[list[float]]:
    """Bytes of this process's own memory, every 5 ms while entered."""
    sizes, ended = [_own_bytes()], threading.Event()

    def look() -> None:
        while not ended.wait(0.005):
            sizes.append(_own_bytes())

    threading.Thread(target=look, daemon=True).start()
    yield sizes
    ended.set()


def _own_bytes() -> float:
    return 1024 * float(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description="Driver cost of a step against its samples.")
    parser.add_argument("--samples", default="1024,4096,16384,65536")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=1)
    arguments = parser.parse_args()
    keep_freed_memory()  # as in `verl train`
    local.RankWorkers = StandIns  # type: ignore[assignment, misc]
    recipe = ProgramSpecs.recipe
    ProgramSpecs.recipe = lambda specs: ("benchmarks.controller:stand_in_specs", *recipe(specs)[1:])  # type: ignore[method-assign]
    sizes = [int(size) for size in arguments.samples.split(",")]
    costs = Costs(sizes)
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            row = measure(Path(folder), size, arguments.tokens, arguments.ranks)
        costs.add(size, {f"{name} a sample": cost / size for name, cost in row.items()})
    print(costs.table(), flush=True)
    for name in ("driver_s", "peak_bytes") if len(sizes) > 1 else ():
        slope, constant = np.polyfit(sizes, np.multiply(costs.rows[f"{name} a sample"], sizes), 1)
        print(f"{name}: {slope:.3g} a further sample, and {constant:.3g} whatever their number", flush=True)


if __name__ == "__main__":
    main()
