"""The three dimensions of `use_3d_hybrid`, each by itself and all together, against plain FSDP: time, communication, memory.

    python benchmarks/hybrid_3d.py                          # minutes on two idle cores
    python benchmarks/hybrid_3d.py --hidden 512 --tokens 256 --rounds 7 --json out.json
    python benchmarks/hybrid_3d.py --ranks 4 --tokens 1024 --chunk-size 512 --hidden 128 --layers 4   # seed 000's lengths

Processes of one thread each on gloo, with the real training engine (a random Llama, float32) and the same rows for every side.
The sides take turns; results are medians over the rounds, after a warm-up round:

- step: seconds of an optimizer step (all micro-batches, gradients, AdamW) of the slower rank.
- sent: bytes that leave a rank for gathers of parameters and sums of gradients.
- waits: seconds in which a rank waits for these exchanges, and their share of the step.
- hidden: share of a side's own exchange that no rank waits for, 1 - waits / exchange. The exchange is the time of its bytes
  without overlap, at the rate of plain FSDP. The share is 0 where nothing overlaps, as on gloo, whose calls return when they
  are done. "Only computing" is the same step of each rank with whole parameters and without any exchange.
- peak: most memory that tensors of a step allocate in addition to the memory held between steps, on the larger rank.

Exit code 1: a side's loss differs from the loss of plain FSDP by more than 1e-5.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from ranks import launch
from report import Report, Series, number, ratio

PLAIN, ALONE = "plain FSDP", "only computing"
_ON = {"use_3d_hybrid": True}
SIDES: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "prefetch": {"forward_prefetch": True},
    "model: 2 layers": {**_ON, "layer_per_group": 2},
    "sequence: chunks": {**_ON, "enable_chunked_attention": True},
    "batch: groups of 4": {**_ON, "batch_group_size": 4},
    "all three": {
        **_ON,
        "layer_per_group": 2,
        "enable_chunked_attention": True,
        "batch_group_size": 4,
    },
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    with tempfile.TemporaryDirectory(prefix="verl-3d-") as scratch:
        measured = run(arguments, Path(scratch))
    report = Report("Three dimensions of training work", facts=_facts(arguments))
    is_right = fill(report, measured)
    report.finish(arguments.json)
    return 0 if is_right else 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each side, after one to warm up")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the model")
    parser.add_argument("--layers", type=int, default=6, help="of the model")
    parser.add_argument("--tokens", type=int, default=128, help="of a micro-batch")
    parser.add_argument("--chunk-size", type=int, default=128, help="tokens of a chunk of the sequence")
    parser.add_argument("--micro-batches", type=int, default=8, help="of a step, on each rank")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.set_defaults(device="cpu")
    arguments = parser.parse_args(argv)
    if (
        min(arguments.rounds, arguments.layers, arguments.micro_batches, arguments.ranks - 1) < 1
        or arguments.hidden % 64
    ):
        parser.error("at least one round, layer and micro-batch and two ranks, and a --hidden that is a multiple of 64")
    if arguments.tokens < 32:
        parser.error("--tokens is at least 32")
    return arguments


def _facts(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": f"Llama, hidden size {arguments.hidden}, {arguments.layers} layers, float32",
        "ranks": f"{arguments.ranks} of one thread, gloo",
        "a step of a rank": f"{arguments.micro_batches} micro-batches of {arguments.tokens} tokens",
        "rounds": arguments.rounds,
    }


def run(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Run all ranks; returns the result of each."""
    from verl.models.tiny import make_tiny_model

    model = make_tiny_model(
        folder / "model", hidden_size=arguments.hidden, intermediate_size=3 * arguments.hidden, vocab_size=4096,
        num_hidden_layers=arguments.layers, num_attention_heads=8, num_key_value_heads=4, head_dim=arguments.hidden // 8,
    )  # fmt: skip
    return launch(measure, arguments.ranks, folder, arguments, str(model))


def measure(comm: Any, arguments: argparse.Namespace, model: str) -> dict[str, Any]:
    """One rank: every side in turns."""
    sides: dict[str, dict[str, Any] | None] = {**SIDES, ALONE: None}
    engines = {
        name: build(model, keys and {**keys, "chunk_size": arguments.chunk_size}) for name, keys in sides.items()
    }
    measures: dict[str, dict[str, Any]] = {name: {"seconds": [], "waits": []} for name in engines}
    for round_, (name, engine) in itertools.product(range(arguments.rounds + 1), engines.items()):
        batch = rows(arguments, seed=1000 * round_ + comm.rank)
        comm.barrier("the same start")
        taken = timed(engine, batch, arguments.tokens)
        if round_:
            measures[name]["seconds"].append(taken["seconds"])
            measures[name]["waits"].append(taken["waits"])
        measures[name] |= {"sent": taken["sent"], "loss": taken["loss"]}
    for name, engine in engines.items():
        comm.barrier("the same start")
        measures[name]["peak"] = peak_bytes(
            lambda engine=engine: timed(engine, rows(arguments, comm.rank), arguments.tokens)
        )
    return measures


def build(model: str, keys: dict[str, Any] | None) -> Any:
    """The engine of a side; None: of a single rank."""
    import torch

    from verl.config import FSDPConfig, ModelConfig, OptimConfig
    from verl.engines.api import ENGINES

    return ENGINES.get("local" if keys is None else "fsdp")(
        model=ModelConfig(path=model, enable_gradient_checkpointing=False), optim=OptimConfig(lr=1e-4), head="lm",
        engine=FSDPConfig(dtype="float32", **(keys or {})), device=torch.device("cpu"), total_steps=1000,
    )  # fmt: skip


def rows(arguments: argparse.Namespace, seed: int) -> Any:
    """A step's rows of this rank: distinct prompts, each with a response, together as long as a micro-batch."""
    import torch

    from verl.data_proto.proto import DataProto

    generator = torch.Generator().manual_seed(seed)
    shape = (arguments.micro_batches, arguments.tokens // 2)
    there = torch.ones(shape, dtype=torch.bool)
    return DataProto.from_dict(
        {
            "prompts": torch.randint(3, 250, shape, generator=generator),
            "responses": torch.randint(3, 250, shape, generator=generator),
            "prompt_mask": there,
            "response_mask": there.clone(),
        }
    )


def timed(engine: Any, batch: Any, max_tokens: int) -> dict[str, float]:
    """One optimizer step."""
    from verl.data_proto.metrics import Metric
    from verl.engines.api import MicroBatching
    from verl.parallel.traffic import TRAFFIC

    def loss(outputs: Any, part: Any, totals: Any) -> Any:
        value = -outputs["log_probs"].sum() / totals.num_tokens
        return value, {"nll": Metric.sum(value.detach())}

    TRAFFIC.take()
    began = time.perf_counter()
    metrics = engine.train_batch(batch, loss, ("log_probs",), MicroBatching(max_tokens=max_tokens))
    taken, exchanged = time.perf_counter() - began, TRAFFIC.take()
    return {
        "seconds": taken,
        "waits": exchanged.seconds,
        "sent": exchanged.num_bytes,
        "loss": float(metrics["nll"].value),
    }


def peak_bytes(run: Any) -> int:
    """Peak bytes of tensors above the starting level, by their allocations."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = (e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    return max(itertools.accumulate(sizes), default=0)


def fill(report: Report, measured: list[dict[str, Any]]) -> bool:
    """The table and results; returns whether losses agree."""
    steps = {
        name: Series(tuple(map(max, zip(*(r[name]["seconds"] for r in measured), strict=True)))) for name in measured[0]
    }
    waits = {
        name: Series(tuple(map(max, zip(*(r[name]["waits"] for r in measured), strict=True)))) for name in measured[0]
    }
    plain_bytes = max(r[PLAIN]["sent"] for r in measured)
    lines, is_right = [], True
    for name in SIDES:
        peak, sent = max(r[name]["peak"] for r in measured), max(r[name]["sent"] for r in measured)
        exchange = waits[PLAIN].median * sent / plain_bytes
        hidden = max(0.0, 1 - waits[name].median / exchange) if exchange else 0.0
        is_right &= all(abs(r[name]["loss"] - r[PLAIN]["loss"]) < 1e-5 * abs(r[PLAIN]["loss"]) for r in measured)
        lines.append(
            [
                name, steps[name].text("s"), f"{ratio(steps[PLAIN], steps[name]):.2f}", f"{sent / 1e6:.1f} MB",
                f"{number(waits[name].median)} s, {waits[name].median / steps[name].median:.0%}", f"{hidden:.0%}",
                f"{peak / 1e6:.0f} MB",
            ]
        )  # fmt: skip
        report.results[name] = {
            "step_s": steps[name].to_json(), "waits_s": waits[name].to_json(), "sent_bytes": sent, "peak_bytes": peak,
            "times_plain": ratio(steps[PLAIN], steps[name]), "hidden": hidden,
        }  # fmt: skip
    report.add_table(["", "step", "times plain", "sent", "waits", "hidden", "peak"], lines)
    report.notes.append(f"Only computing takes {steps[ALONE].text('s')}.")
    report.notes.append("Losses agree." if is_right else "LOSSES DIFFER.")
    return is_right


if __name__ == "__main__":
    raise SystemExit(main())
