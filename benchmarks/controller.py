"""Driver cost of a GRPO step against its samples. Engines are replaced by stand-ins, which return columns of the right shapes.

    python -m benchmarks.controller                              1,024 to 65,536 samples of 512 tokens
    python -m benchmarks.controller --ranks 2                    on Ray
    python -m benchmarks.controller --simulated 64,128,256,512   start and step of so many processes, on a stand-in for Ray

Host, program, dispatch, ledger and files are the same as in `verl train`. The second step is measured: seconds of the main
thread without the stand-ins; seconds until ledger and samples are on the disk after it; the growth of the process's own memory
at its highest, without the object store of Ray; bytes on the disk. In one process the memory includes the columns of the ranks.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.scale import Costs, assigned, overrides, timed
from verl.config import load_config
from verl.data_proto.merge import object_array
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.data_proto.token_values import token_keys
from verl.models.tiny import make_tiny_model
from verl.programs.api import ProgramSpecs, specs_of_recipe
from verl.roles.rollout import sample_key
from verl.roles.updates import Updates
from verl.run.host import SteppedRun
from verl.runtime import local

GROUP, PROMPT = 8, 64  # samples of a prompt, tokens of a prompt
_DEVICES = 8  # of a simulated node


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
        return lambda *_: {"facts": {"device": "cpu"}, "rollout_exact_log_probs": True, "reward_num_defaulted": 0}.get(
            name, {}
        )

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
        pairs = zip(rows.batch["ordinal"].tolist(), numbers.tolist(), strict=True)
        names = {"finish_reason": ["stop"] * n, "sample_key": [sample_key(split, *pair) for pair in pairs]}
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


@dataclass(eq=False)
class Answer:
    """A reference of SimulatedRay, whose value arrives at a time."""

    value: Any
    time: float


class SimulatedRay:
    """Ray as verl/runtime/ray_cluster.py calls it, with all processes in this one. Answers arrive 1 ms after each other. Counts
    requests of the driver, bytes in them, references that a wait looks at, and seconds of the processes."""

    ObjectRef = Answer

    def __init__(self, num_nodes: int):
        self.now, self.last, self.counts = 0.0, 0.0, Counter[str]()
        place = self.asked({"bundles_to_node_id": {0: "0"}})
        self.util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1", placement_group_table=place)
        node = {"Alive": True, "Resources": {"CPU": _DEVICES}, "NodeID": "0", "NodeManagerAddress": "127.0.0.1"}
        self.nodes, self.is_initialized = self.asked([node] * num_nodes), lambda: True

    def asked(self, value: object) -> Callable[..., Any]:
        """A request with this answer, whose size counts as sent."""
        size = len(json.dumps(value, default=str))
        return lambda *_, **__: (self.counts.update(requests=1, bytes=size), value)[1]

    def run(self, work: Callable[..., Any], *arguments: Any) -> Answer:
        started, self.last = time.thread_time(), max(self.last, self.now) + 1e-3
        value = work(*(one.value if isinstance(one, Answer) else one for one in arguments))
        self.counts["processes_s"] += time.thread_time() - started
        buffers = [part for one in arguments if type(one) is list for part in one if type(part) is not Answer]
        self.counts.update(requests=1, bytes=sum(memoryview(buffer).nbytes for buffer in buffers))
        return Answer(value, self.last)

    def remote(self, **_: object) -> Callable[[type], Any]:
        def actors(cls: type) -> Any:
            handle = lambda *arguments: _Actor(self, self.run(cls, *arguments).value)  # noqa: E731
            return self.asked(SimpleNamespace(options=lambda **_: SimpleNamespace(remote=handle)))()

        return actors

    def wait(self, refs: list[Answer], num_returns: int, timeout: float) -> tuple[list[Answer], list[Answer]]:
        self.counts["references"] += len(refs)
        self.now = max(self.now, min(sorted(ref.time for ref in refs)[num_returns - 1], self.now + timeout))
        return [ref for ref in refs if ref.time <= self.now], [ref for ref in refs if ref.time > self.now]

    def get(self, ref: Answer, timeout: float = 0) -> Any:
        return ref.value

    def put(self, value: Any) -> Answer:
        return self.run(lambda stored: stored, value)

    def kill(self, *_: object, **__: object) -> None:
        self.counts["requests"] += 1


class _Actor:
    def __init__(self, ray: SimulatedRay, process: object):
        self._ray, self._process = ray, process

    def __getattr__(self, method: str) -> Any:
        call = partial(self._ray.run, getattr(self._process, method))
        return SimpleNamespace(remote=call, options=lambda **_: SimpleNamespace(remote=call))


class _Group:
    bundle_count = _DEVICES

    def __init__(self, *_: object, **__: object): ...

    def ready(self) -> Answer:
        return Answer(None, 0.0)


def simulate(num_nodes: int) -> SimulatedRay:
    """Have the ray runtime use SimulatedRay from now on."""
    cluster, runtime, ray = (
        import_module("verl.runtime.ray_cluster"),
        import_module("verl.runtime.ray"),
        SimulatedRay(num_nodes),
    )
    vars(cluster).update(ray=ray, placement_group=_Group, remove_placement_group=ray.kill)
    vars(cluster)["PlacementGroupSchedulingStrategy"] = SimpleNamespace
    vars(runtime).update(
        own_device=torch.device, setup_logging=lambda *_: None, Collectives=SimpleNamespace(start=lambda *_, **__: None)
    )
    return ray


def stand_in_specs(*recipe: Any) -> ProgramSpecs:
    """The specs of a rank's process on Ray, with stand-ins in it."""
    vars(import_module("verl.runtime.ray"))["RankWorkers"] = StandIns
    return _read_once(json.dumps(recipe))


@cache
def _read_once(recipe: str) -> ProgramSpecs:
    return specs_of_recipe(*json.loads(recipe))


def measure_processes(folder: Path, samples: int, tokens: int, ranks: int) -> dict[str, float]:
    """Start and step of `ranks` simulated processes."""
    ray, row = simulate(ranks // _DEVICES), {}
    with configured(folder, samples, tokens, _DEVICES, ranks // _DEVICES) as run:
        for phase, work in {"start": run._started, "first step": run.step, "step": run.step}.items():
            ray.counts.clear()
            started = time.thread_time()
            work()
            counts = {
                "ms of the driver": 1e3 * (time.thread_time() - started - ray.counts.pop("processes_s")),
                **ray.counts,
            }
            row |= {f"{phase}, {name}": float(count) for name, count in counts.items()}
    return row


def configured(folder: Path, samples: int, tokens: int, ranks: int, nodes: int = 1) -> SteppedRun:
    """A run of steps of `samples` samples."""
    shared = {"data_source": "letters", "reward_model": {"style": "rule", "ground_truth": "letters"}}
    rows = [{**shared, "prompt": [{"role": "user", "content": f"{i} + 1"}]} for i in range(samples // GROUP)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {
        "actor_rollout_ref.rollout.n": GROUP, "actor_rollout_ref.actor.ppo_mini_batch_size": samples // GROUP,
        "data.train_batch_size": samples // GROUP, "data.max_prompt_length": PROMPT, "data.max_response_length": tokens,
        "trainer.total_training_steps": 4, "trainer.default_local_dir": folder / "run", "trainer.n_gpus_per_node": ranks,
        "trainer.nnodes": nodes,
    }  # fmt: skip
    keys = (*overrides(make_tiny_model(folder / "model"), folder, folder / "rows.jsonl"), *assigned(changes))
    return SteppedRun(load_config(keys))


def measure(folder: Path, samples: int, tokens: int, ranks: int) -> dict[str, float]:
    with configured(folder, samples, tokens, ranks) as run:
        run.step()
        loop, _ = run._started()
        loop.tracker.flush()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        there = getattr(loop.roles.end.__self__, "workers", None) or SimpleNamespace(seconds=0.0)
        with own_memory() as sizes:
            start = time.thread_time() - there.seconds
            run.step()
            row = {"driver_s": time.thread_time() - there.seconds - start}
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
    parser.add_argument("--processes", help="numbers of simulated processes, multiples of 8")
    arguments = parser.parse_args()
    local.RankWorkers = StandIns  # type: ignore[assignment, misc]
    recipe = ProgramSpecs.recipe
    ProgramSpecs.recipe = lambda specs: ("benchmarks.controller:stand_in_specs", *recipe(specs)[1:])  # type: ignore[method-assign]
    sizes = [int(size) for size in (arguments.processes or arguments.samples).split(",")]
    costs = Costs(sizes)
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            if arguments.processes:
                costs.add(size, measure_processes(Path(folder), 4096, 64, size))
            else:
                row = measure(Path(folder), size, arguments.tokens, arguments.ranks)
                costs.add(size, {f"{name} a sample": cost / size for name, cost in row.items()})
    print(costs.table(), flush=True)


if __name__ == "__main__":
    main()
