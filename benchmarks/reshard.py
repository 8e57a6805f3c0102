"""New weights from training ranks to ranks that generate: by plan, against gathering every weight whole on every rank.

    python benchmarks/reshard.py                          # three or four minutes on two cores
    python benchmarks/reshard.py --rounds 9 --hidden 1024 --json out.json
    python benchmarks/reshard.py --messages               # as between hosts: no memory that ranks share
    python benchmarks/reshard.py --engine megatron --layers 8   # layouts of Megatron, with stages of layers

Processes of one thread each on gloo (with a GPU for each: on NCCL), 2 and then 4 of them, with the real training engine (a
random Llama, float32 masters) and real copies for generation, in bfloat16 and in float32. For each pair of layouts the two ways
take turns on the same weights, which change in between. The resulting copies are compared bit for bit:

- plan: values that a rank lacks are cast and sent from rank to rank; digests of the sent and of the received values agree.
  Ranks that generate with the same weights share one memory, and values that the memory lacks are written once.
- gather: `engine.gather_weights()` into `Replica.load`, one tensor after the other, as the original system does: gathered whole
  over all training ranks in the training dtype, then cast, then cut; not verified.

Bytes count the data that reaches memory, over all ranks. "bound" counts the values that ranks need and do not hold; no
way moves less. Staging is the largest buffer on a rank: buckets in flight, or a whole tensor, both as held and as cast.
Seconds are the slowest rank's. "of its work" compares the processor seconds of all ranks, which other programs disturb less.
"of floor" compares with a bare copy: as many numbers as each rank generates with, cast into a separate copy, by all ranks at
once, without exchange or checksums. Exit code 1: the bytes sent differed from the plan, or the copies differed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from ranks import LIMIT_S, launch
from report import Report, Series, number, ratio
from reshard_pairs import MEGATRON_PAIRS, PAIRS, Pair, build_engine

_FORMATS = ("bfloat16", "float32")  # of the copies
_MOE = {"num_experts": 8, "moe_intermediate_size": 256, "num_experts_per_tok": 2}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    with tempfile.TemporaryDirectory(prefix="verl-reshard-") as scratch:
        models = make_models(Path(scratch), arguments)
        measured: dict[str, list[dict[str, Any]]] = {}
        for num_ranks in sorted({pair.num_ranks for pair in pairs_of(arguments)}):
            files = launch(measure_pairs, num_ranks, Path(scratch), arguments, models)
            measured |= {name: [file[name] for file in files] for name in files[0]}
    report = Report("Weights by plan against gathering them whole", facts=_facts(arguments))
    is_right = fill(report, measured)
    report.finish(arguments.json)
    return 0 if is_right else 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="updates each way, after one to warm up")
    parser.add_argument("--hidden", type=int, default=512, help="hidden size of the model")
    parser.add_argument("--layers", type=int, default=6, help="of the model")
    parser.add_argument(
        "--engine", choices=("fsdp", "megatron"), default="fsdp", help="megatron needs the extra of that name"
    )
    parser.add_argument("--messages", action="store_true", help="exchange through connections alone, as hosts do")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="cuda: a GPU for each rank (default: where there are four)"
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1 or arguments.layers < 1 or arguments.hidden % 64:
        parser.error("at least --rounds 1 and --layers 1 are needed, and a --hidden that is a multiple of 64")
    num_gpus, num_ranks = count_gpus(), max(pair.num_ranks for pair in pairs_of(arguments))
    arguments.device = arguments.device or ("cuda" if num_gpus >= num_ranks else "cpu")
    if arguments.device == "cuda" and num_gpus < num_ranks:
        parser.error(f"--device cuda needs {num_ranks} GPUs, one for each rank, and {num_gpus} are here; leave it away")
    return arguments


def pairs_of(arguments: argparse.Namespace) -> tuple[Pair, ...]:
    return MEGATRON_PAIRS if arguments.engine == "megatron" else PAIRS


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _facts(arguments: argparse.Namespace) -> dict[str, Any]:
    is_gpu = arguments.device == "cuda"
    transport = "messages" if arguments.messages or is_gpu else "memory that ranks share"
    return {
        "model": f"Llama (and Qwen3-MoE with 8 experts), hidden size {arguments.hidden}, {arguments.layers} layers",
        "number format in training": "float32",
        "transport": f"{transport}; gathering over {'NCCL' if is_gpu else 'gloo'}",
        "processes": f"of one thread, on this machine, each with {'a GPU' if is_gpu else 'the CPU'}",
        "rounds": arguments.rounds,
    }


def make_models(folder: Path, arguments: argparse.Namespace) -> dict[bool, str]:
    """Is a mixture -> folder of the model."""
    from verl.models.tiny import make_tiny_model

    sizes = {
        "hidden_size": arguments.hidden,
        "intermediate_size": 3 * arguments.hidden,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": arguments.hidden // 8,
        "vocab_size": 8192,
        "initializer_range": 0.02,
    }
    return {
        False: str(make_tiny_model(folder / "dense", **sizes)),
        True: str(make_tiny_model(folder / "mixture", "qwen3_moe", **sizes, **_MOE)),
    }


def measure_pairs(comm: Any, arguments: argparse.Namespace, models: dict[bool, str]) -> dict[str, dict[str, Any]]:
    """Pair and format -> results of this rank, for all pairs on as many ranks as there are."""
    import torch

    from verl.reshard.update import PlannedUpdate

    if arguments.messages:
        PlannedUpdate._share_memory = lambda self: None  # type: ignore[assignment, method-assign, return-value]
    device = torch.device(arguments.device, comm.rank) if arguments.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return {
        f"{pair.name}, {dtype}": measure(pair, models[pair.is_mixture], dtype, arguments.rounds, comm, device)
        for dtype in _FORMATS
        for pair in pairs_of(arguments)
        if pair.num_ranks == comm.world_size
    }


def measure(pair: Pair, model: str, dtype: str, rounds: int, comm: Any, device: Any) -> dict[str, Any]:
    """Results of this rank, with copies in `dtype`."""
    import torch

    from verl.reshard.update import plan_update

    engine, (replica, gathered), training, rollout = build(pair, model, dtype, device)
    update = plan_update(comm, training, rollout, engine=engine, replica=replica, device=device)
    assert update is not None
    ways = {
        "plan": update,
        "gather": lambda: gathered.load(engine.gather_weights()),
        "floor": bare_copy(gathered),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    worked: dict[str, list[float]] = {name: [] for name in ways}
    is_same = True
    for number_of_round in range(rounds + 1):
        comm.barrier("a round")  # before one changes what another still compares
        with torch.no_grad():
            for tensor in engine.local_weights().values() if engine is not None else ():
                tensor.mul_(1.01)
            for part in (*replica.parts().values(), *gathered.parts().values()):
                part.zero_()
        for name in ("plan", "floor", "gather") if number_of_round % 2 else ("floor", "gather", "plan"):
            taken, processor = timed(ways[name], comm)
            seconds[name].append(taken)
            worked[name].append(processor)
        theirs = gathered.parts()
        is_same &= all(torch.equal(part, theirs[key]) for key, part in replica.parts().items())
    return {
        "is_same": is_same,
        "seconds": {name: values[1:] for name, values in seconds.items()},
        "processor": {name: values[1:] for name, values in worked.items()},
        "sent": update.transport.num_sent_bytes / (rounds + 1),
        "plan": update.plan.sent_bytes.get(comm.rank, 0),
        "staging": update.transport.peak_staging_bytes,
        **expected(engine, training, update.target, getattr(torch, dtype).itemsize, comm.rank),
    }


def expected(engine: Any, training: Any, target: Any, itemsize: int, rank: int) -> dict[str, int]:
    """Bytes by the layouts only: values that `target` ranks lack, and values that gathering moves and holds in memory."""
    import math

    from tests.reshard.reference import full_gather, lower_bound
    from verl.reshard.hf_sharding import decoder_tensors

    declared = engine.weight_layout()
    sizes = {name: math.prod(shape) for name, shape in declared.shapes.items()}
    tensors = decoder_tensors(
        declared.shapes,
        num_layers=declared.num_layers,
        num_heads=declared.num_heads,
        num_kv_heads=declared.num_kv_heads,
        itemsize=itemsize,
    )
    return {
        "bound": lower_bound(tensors, training, target).get(rank, 0),
        "gathered": full_gather(tensors, training, [rank], held_itemsize=4)[rank],
        "whole": max(sizes.values()) * (4 + (itemsize if itemsize != 4 else 0)),
        "model": sum(sizes.values()) * itemsize,
    }


def build(pair: Pair, model: str, dtype: str, device: Any) -> tuple[Any, Any, Any, Any]:
    """Training engine, copies for generation (one for each way: gathered weights are not shared), and the layouts of both."""
    import torch

    from verl.models.load import load_causal_lm
    from verl.parallel.mesh import Mesh
    from verl.reshard.grouping import consecutive_engines, interval_engines
    from verl.reshard.layout import RolloutLayout
    from verl.rollout.rollout_model import Replica, copy_group

    engine, training = build_engine(pair, model, dtype, device)
    ranks = range(pair.num_ranks)
    if pair.interval:
        engines = interval_engines(training, pair.size, by_experts=pair.is_mixture)
    else:
        engines = consecutive_engines(ranks, pair.size)
    order = [rank for copy in engines for stage in copy for rank in stage]
    group = copy_group(Mesh.grid(order, replicate=len(order) // pair.size, tp=pair.size), LIMIT_S)
    modules = [load_causal_lm(model, device=device, dtype=getattr(torch, dtype)) for _ in range(2)]
    rollout = RolloutLayout(engines, expert_groups=tuple(stage for copy in engines for stage in copy))
    return engine, [Replica(module.requires_grad_(False), group) for module in modules], training, rollout


def bare_copy(replica: Any) -> Any:
    """Lower bound of every way on this machine: as many float32 numbers as this rank generates with, cast into its copy by all
    ranks at once, without exchange or checksums."""
    import torch

    trained = {name: torch.full(part.shape, 0.5, device=part.device) for name, part in replica.parts().items()}

    @torch.no_grad()
    def copy() -> None:
        for name, part in replica.parts().items():
            part.copy_(trained[name])

    return copy


def timed(way: Any, comm: Any) -> tuple[float, float]:
    """Seconds from the moment when all ranks are there until this one is done, and of a processor that it worked."""
    import torch

    finish = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    finish()
    comm.barrier("the same start")
    began, worked = time.perf_counter(), time.process_time()
    way()
    finish()
    return time.perf_counter() - began, time.process_time() - worked


def fill(report: Report, measured: dict[str, list[dict[str, Any]]]) -> bool:
    """Tables and results; returns whether bytes and copies were right."""
    moved, taken, is_right = [], [], True
    for name, parts in measured.items():
        total = {key: sum(rank[key] for rank in parts) for key in ("sent", "plan", "bound", "gathered")}
        slowest = {
            way: Series(tuple(map(max, zip(*(rank["seconds"][way] for rank in parts), strict=True))))
            for way in ("plan", "gather", "floor")
        }
        worked = {
            way: Series(tuple(map(sum, zip(*(rank["processor"][way] for rank in parts), strict=True))))
            for way in ("plan", "gather")
        }
        staging, whole = (max(rank[key] for rank in parts) for key in ("staging", "whole"))
        share, of_floor = ratio(slowest["plan"], slowest["gather"]), ratio(slowest["plan"], slowest["floor"])
        of_work = ratio(worked["plan"], worked["gather"])
        moved.append([name, *(megabytes(total[key]) for key in total), percent(total["sent"], total["gathered"])])
        row = [name, slowest["plan"].text("s"), slowest["gather"].text("s"), *map(number, (share, of_work, of_floor))]
        taken.append([*row, megabytes(staging), megabytes(whole), percent(staging, parts[0]["model"])])
        is_right &= total["sent"] == total["plan"] == total["bound"] and all(rank["is_same"] for rank in parts)
        report.results[name] = {
            **total, "seconds": {way: s.to_json() for way, s in slowest.items()}, "plan of gather": share,
            "plan of floor": of_floor, "processor": {way: s.to_json() for way, s in worked.items()},
            "staging": staging, "largest whole tensor": whole, "copies": parts[0]["model"],
        }  # fmt: skip
    report.add_table(["bytes", "sent", "plan", "bound", "gather", "of gather"], moved)
    columns = ["seconds and staging", "plan", "gather", "of gather", "of its work", "of floor"]
    columns += ["plan's", "gather's", "plan's, of a copy"]
    report.add_table(columns, taken)
    words = (
        "are those of the plan and of the bound, and both ways left" if is_right else "or copies DIFFER; nothing left"
    )
    report.notes.append(f"Bytes sent {words} the same bits.")
    return is_right


def megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.1f} MB"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "-"


if __name__ == "__main__":
    sys.exit(main())
