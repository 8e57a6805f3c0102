"""Measurements of a machine and of a config, each as a table: `verl.utils.benchmark_nccl()` and `benchmark_throughput()`.

Both start separate processes, with a deadline; under torchrun `benchmark_nccl` uses its ranks.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl.errors import DeadlineError, ModelError
from verl.parallel.child_processes import die_with, python_command

_MIB = 1 << 20
_SIZES = (1 * _MIB, 16 * _MIB, 128 * _MIB)  # without a model
_WARM_UPS = 2


@dataclass(frozen=True)
class AllGatherTime:
    """All-gathers of `num_bytes` over groups of `num_ranks` devices with equal shards. `seconds` is the time
    of one on the slowest device; `backend` is nccl or gloo."""

    backend: str
    num_ranks: int
    num_bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        """Bytes that each device receives in a second."""
        return self.num_bytes * (1 - 1 / self.num_ranks) / self.seconds


def benchmark_nccl(
    model_path: str | None = None, *, num_ranks: int | None = None, num_repeats: int = 5, timeout_s: float = 300.0
) -> list[AllGatherTime]:
    """Time of the all-gathers of parameters in sharded training, for every number of devices that can share
    a copy of the model; printed as a table.

    Sizes are the bytes of a decoder layer and of the embedding of the model in `model_path`, in bfloat16, else 1, 16 and 128
    MiB. NCCL connects GPUs; gloo connects processes on a machine without GPUs. Under torchrun its ranks take part and rank 0
    prints; else `num_ranks` processes are started (default: one for each GPU, or 2). Raises ModelError when they fail,
    DeadlineError after `timeout_s`.
    """
    from verl.parallel.collectives import peer_of_environment

    sizes = _SIZES if model_path is None else unit_bytes(model_path)
    peer = peer_of_environment()
    if peer is None or peer.world_size == 1:
        import torch

        count = num_ranks or max(2, torch.cuda.device_count())
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        ranks = python_command("verl.compat.measure", json.dumps([sizes, num_repeats, timeout_s]))[1:]
        said = _output([*launcher, *ranks], timeout_s)
        times = [AllGatherTime(**row) for row in json.loads(said.strip().splitlines()[-1])]
    else:
        times = measure_gathering(sizes, num_repeats, timeout_s)
    if peer is None or peer.rank == 0:
        group_sizes = sorted({g.num_ranks for g in times})
        _show_table(
            f"all-gather by {times[0].backend}, over groups of {', '.join(map(str, group_sizes))} devices",
            ("devices of a copy", "MiB", "ms", "GB/s"),
            [
                (g.num_ranks, f"{g.num_bytes / _MIB:.1f}", f"{1e3 * g.seconds:.2f}", f"{g.bytes_per_s / 1e9:.2f}")
                for g in times
            ],
        )
    return times


def measure_gathering(sizes: Sequence[int], num_repeats: int, timeout_s: float) -> list[AllGatherTime]:
    """See `benchmark_nccl`, on every rank of a launcher."""
    import torch
    import torch.distributed as dist

    from verl.parallel.collectives import Collectives, peer_of_environment
    from verl.parallel.device import make_current

    peer = peer_of_environment()
    assert peer is not None
    device = torch.device(f"cuda:{peer.local_rank}" if torch.cuda.is_available() else "cpu")
    make_current(device)
    comm = Collectives.start(
        peer, device_type=device.type, timeout_s=timeout_s, start_timeout_s=timeout_s, call_timeout_s=timeout_s
    )
    times = []
    with comm.doing("the all-gathers of benchmark_nccl"):
        for count in [n for n in range(2, peer.world_size + 1) if peer.world_size % n == 0]:
            firsts = range(0, peer.world_size, count)
            groups = [dist.new_group(range(first, first + count)) for first in firsts]
            for size in sizes:
                shard = torch.zeros(max(1, size // count), dtype=torch.uint8, device=device)
                seconds = _seconds_of(groups[peer.rank // count], shard, count, num_repeats)
                name = "nccl" if device.type == "cuda" else "gloo"
                times.append(AllGatherTime(name, count, count * len(shard), seconds))
    comm.close()
    return times


def _seconds_of(group: object, shard: Any, count: int, num_repeats: int) -> float:
    """Of one all-gather, on the slowest rank of the run."""
    import torch
    import torch.distributed as dist

    gathered = torch.empty(count * len(shard), dtype=shard.dtype, device=shard.device)
    for repeat in range(_WARM_UPS + num_repeats):
        if repeat == _WARM_UPS:
            dist.barrier()
            started = time.perf_counter()
        dist.all_gather_into_tensor(gathered, shard, group=group)
        if shard.is_cuda:
            torch.cuda.synchronize()
    slowest = torch.tensor([(time.perf_counter() - started) / num_repeats], dtype=torch.float64, device=shard.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def unit_bytes(model_path: str) -> tuple[int, ...]:
    """Bytes of a decoder layer and of the embedding in bfloat16: units that FSDP gathers at a time. Raises ModelError for a
    folder without a model."""
    import torch

    from verl.config import ModelConfig
    from verl.models.load import meta_model

    module = meta_model(ModelConfig(path=model_path), torch.bfloat16)
    units = (module.get_decoder().layers[0], module.get_input_embeddings())
    return tuple(sorted(sum(p.numel() * p.element_size() for p in unit.parameters()) for unit in units))


def benchmark_throughput(
    overrides: Sequence[str] = (), *, num_steps: int = 5, timeout_s: float = 1800.0
) -> dict[str, object]:
    """Run `num_steps` steps of `verl train` with `overrides`, in a folder that is removed. Tokens per second and the share of
    each phase are printed as by `verl show`. Without a model, the run uses a tiny random model and a small task.

    Returns tokens_per_s (of each device), step_s (median) and shares {phase: share of the time}. Raises ModelError with the
    last line of a run that fails, DeadlineError after `timeout_s`.
    """
    from rich.console import Console

    from verl.cli.show import show_time
    from verl.tracking.files import read_json_rows
    from verl.tracking.progress import read_progress

    with tempfile.TemporaryDirectory(prefix="verl-throughput-") as root:
        folder = Path(root) / "run"
        has_model = any("model.path=" in override for override in overrides)
        measured = [
            "trainer.val_before_train=False",
            "trainer.test_freq=-1",
            "trainer.save_freq=-1",
            "trainer.logger=[file]",
            f"trainer.total_training_steps={num_steps}",
            f"trainer.default_local_dir={folder}",
            "trainer.max_restarts=0",
        ]
        _output(["verl", "train", *([] if has_model else _tiny_task(Path(root))), *overrides, *measured], timeout_s)
        progress, rows = read_progress(folder), list(read_json_rows(folder / "metrics.jsonl"))
    assert progress.bottleneck is not None
    rates = sorted(row["perf/throughput"] for row in rows[len(rows) > 1 :])  # the first step includes warm-up
    console = Console(highlight=False)
    show_time(progress.bottleneck, console)
    model = "" if has_model else " of a tiny random model"
    console.print(f"{rates[len(rates) // 2]:,.0f} tokens per second and device{model}, median of {len(rates)} steps")
    return {
        "tokens_per_s": rates[len(rates) // 2],
        "step_s": progress.bottleneck.step_s,
        "shares": progress.bottleneck.shares,
    }


def _tiny_task(root: Path) -> list[str]:
    from verl.models.tiny import make_tiny_model

    rows = [
        {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": f"What is {i} + {i}?"}],
         "reward_model": {"style": "rule", "ground_truth": str(2 * i)}}
        for i in range(32)
    ]  # fmt: skip
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"actor_rollout_ref.model.path={make_tiny_model(root / 'model')}",
        f"data.train_files={root}/train.jsonl",
        f"data.val_files={root}/train.jsonl",
        "data.train_batch_size=8",
        "data.max_prompt_length=64",
        "data.max_response_length=32",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    ]


def _output(command: Sequence[str], timeout_s: float) -> str:
    """The output of the module and arguments in `command`."""
    try:
        ended = subprocess.run(
            python_command(*command), capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise DeadlineError(
            f"The measurement took more than timeout_s={timeout_s:g} s; raise it, or ask for less."
        ) from error
    if ended.returncode:
        said = (ended.stderr.strip() or ended.stdout.strip()).splitlines()[-8:]
        raise ModelError(f"The measurement ended with exit code {ended.returncode}: {' | '.join(said)}")
    return ended.stdout


def _show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*map(str, row))
    Console(highlight=False).print(table)


if __name__ == "__main__":  # a rank of `benchmark_nccl`; rank 0 prints the rows
    die_with(os.getppid())
    rows = [asdict(row) for row in measure_gathering(*json.loads(sys.argv[1]))]
    if os.environ["RANK"] == "0":
        sys.stdout.write(json.dumps(rows) + "\n")
