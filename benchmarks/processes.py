"""Cost of processes of a run on Ray against their number: workers that do nothing, and answers that are already there."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import ray

from benchmarks.scale import shared_bytes, table, timed
from benchmarks.stand_in import StandIn
from verl.runtime.ray_cluster import Pending, RayCluster, Request
from verl.runtime.ray_process import Process
from verl.runtime.ray_worker_group import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

_CALLS = 20
_LIMIT_S = 500.0
_MEMORY = 200_000_000  # of Ray's object store


def measure_processes(sizes: Sequence[int]) -> None:
    """Groups of stand-ins on this machine. An error of the last rank has to name it."""
    costs: dict[str, list[float]] = {}
    for size in sizes:
        request, pool = Request([size], False, _LIMIT_S), RayResourcePool([size], use_gpu=False)
        cluster_s, pool._cluster = timed(
            partial(RayCluster, {"num_cpus": size, "object_store_memory": _MEMORY}, request)
        )
        logs = Path(ray._private.worker.global_worker.node.get_logs_dir_path())
        pool.cluster.reserve()
        pool.cluster.spawn = partial(spawn_without_torch, pool.cluster.spawn)
        start_s, group = timed(partial(RayWorkerGroup, pool, RayClassWithInitArgs(StandIn)))
        memory = shared_bytes(os.getpid())
        call = partial(group.execute_all_sync, "echo", bytes(1000))
        calls_s, _ = timed(lambda call=call: [call() for _ in range(_CALLS)])
        try:
            group.execute_all_sync("fail", size - 1)
        except RuntimeError as error:
            if f"rank {size - 1} (StandIn; node" not in str(error).splitlines()[0]:
                raise
        written = log_bytes(logs)
        answers = [(Process(rank, None), ray.put(rank)) for rank in range(8 * size)]
        collect_s, _ = timed(Pending("collect", answers, _LIMIT_S, list).get)
        end_s = timed(group.close)[0] + timed(pool.close)[0]
        row = {
            "seconds to start Ray": cluster_s,
            "seconds to start the processes": start_s,
            "ms of a call on all": calls_s / _CALLS * 1e3,
            "ms to collect 8 answers for each": collect_s * 1e3,
            "GB of memory": memory / 1e9,
            "KB of logs": written / 1e3,
            "seconds to end": end_s,
        }
        for name, value in row.items():
            costs.setdefault(name, []).append(value)
        print(f"{size} processes: {', '.join(f'{name} {value:.3g}' for name, value in row.items())}", flush=True)
    print(table(sizes, costs), flush=True)


def spawn_without_torch(spawn: Callable[..., list[Process]], cls: type, _: object, *places: object, **settings: object):
    """Processes in which Ray does not import torch, of which 64 would not fit this machine."""
    return spawn(cls, {"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "0"}, *places, **settings)


def log_bytes(folder: Path) -> int:
    """Of all files under `folder`."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
