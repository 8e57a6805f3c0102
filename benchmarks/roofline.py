"""This machine's limits in matrix products and memory, and what share of them our prefill, decode and training reach.

    python benchmarks/roofline.py                                   # SmolLM2-135M, float32
    python benchmarks/roofline.py --dtype bfloat16 --json figures.json

The counts are the operations that the mathematics needs (benchmarks/flops.py): a shared prompt once, causal attention only
where a token is seen, logits only where a token is sampled or trained, backward as twice the forward. A share is needed
operations per second over this machine's rate for a 2048 x 2048 x 2048 product in the same dtype. For decode it is also
given against only the same matrix products, and as bytes needed (weights once, keys and values) over the read rate.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from as_verb import as_verb
from flops import Decoder, decode_bytes, decode_flops, prefill_flops, training_flops, training_tokens
from peers_cpu import add_workload_options, check_equal, describe, make_workload
from report import Report, Series, number
from workload import Workload

TRAINING_ROWS = 2048  # tokens of a micro-batch in the shipped recipe


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload_options(parser)
    parser.add_argument("--rounds", type=int, default=3, help="measured runs of each phase (after one to warm up)")
    parser.add_argument("--batches", type=int, nargs="*", default=[8, 64], help="sequences of a decode step")
    parser.add_argument("--ours", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of our config")
    return parser.parse_args(argv)


@dataclass(frozen=True)
class Limits:
    """Limits of the machine: operations and bytes per second."""

    square: float
    training: float
    decode: dict[int, float]  # seconds of only a decode step's products, by batch
    read: float
    copy: float

    @classmethod
    def measure(cls, model: Decoder, dtype: Any, batches: list[int]) -> Limits:
        from limits import copy_rate, decode_gemm_seconds, read_rate, square_rate, training_rate

        return cls(
            square=square_rate(dtype),
            training=training_rate(model, TRAINING_ROWS, dtype),
            decode={batch: decode_gemm_seconds(model, batch, dtype) for batch in batches},
            read=read_rate(),
            copy=copy_rate(),
        )

    def rows(self, model: Decoder) -> list[list[str]]:
        rows = [
            ["matrix product, 2048 cubed", f"{number(self.square / 1e9)} GFLOP/s"],
            [f"products of forward and backward, {TRAINING_ROWS} tokens", f"{number(self.training / 1e9)} GFLOP/s"],
        ]
        for batch, seconds in self.decode.items():
            rate = (model.layers(batch) + model.head(batch)) / seconds
            rows.append([f"products of a decode step, {batch} rows", f"{number(rate / 1e9)} GFLOP/s"])
        return [
            *rows,
            ["memory read", f"{number(self.read / 1e9)} GB/s"],
            ["memory copy, read + written", f"{number(self.copy / 1e9)} GB/s"],
        ]


def measure_prefill(side: Any, work: Workload, rounds: int) -> Series:
    """Seconds to compute every prompt of a step and sample one token of each."""
    requests, params = side.requests(0), side.params(n=1, max_new_tokens=1)
    return Series(tuple(timed(lambda: side.generate(requests, params, 0)) for _ in range(rounds + 1))[1:])


def measure_decode(side: Any, work: Workload, batch: int, rounds: int) -> tuple[Series, tuple[int, int]]:
    """Seconds of a decode step of `batch` sequences, as the difference of a long and a short generation of the same prompts;
    and (prompts, samples of each)."""
    num_prompts = min(work.num_prompts, max(1, batch // work.num_samples))
    num_samples = -(-batch // num_prompts)
    requests = side.requests(0, num_prompts)
    engine = side.rollout.engine
    found = []
    for _ in range(rounds + 1):
        seconds, steps = [], []
        for length in (2, work.response_tokens):
            params = side.params(n=num_samples, max_new_tokens=length)
            seconds.append(timed(lambda chosen=params: side.generate(requests, chosen, 0)))
            steps.append(engine.stats()["num_decode_steps"])
        found.append((seconds[1] - seconds[0]) / max(1, steps[1] - steps[0]))
    return Series(tuple(found[1:])), (num_prompts, num_samples)


def timed(function: Any) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%"


def fill_reached(report: Report, side: Any, work: Workload, limits: Limits, options: argparse.Namespace) -> None:
    """Measure the three phases and say what share of the limits they reach."""
    model, rounds = Decoder.of_folder(work.model), options.rounds
    prefill = measure_prefill(side, work, rounds)
    needed = prefill_flops(model, work.num_prompts, work.prompt_tokens)
    tokens = work.num_prompts * work.prompt_tokens
    rows = [phase_row("prefill", prefill, tokens, needed, limits.square)]
    results: dict[str, Any] = {"prefill": phase_result(prefill, tokens, needed, limits.square)}
    width = 4 if work.dtype == "float32" else 2
    decode_rows = []
    for batch in options.batches:
        step, (prompts, samples) = measure_decode(side, work, batch, rounds)
        own = (work.response_tokens + 2) / 2
        needed = decode_flops(model, prompts * samples, work.prompt_tokens + own)
        moved = decode_bytes(model, prompts, samples, work.prompt_tokens, own, width)
        rows.append(phase_row(f"decode, batch {batch}", step, prompts * samples, needed, limits.square))
        alone, reading = limits.decode[batch], moved / limits.read
        results[f"decode_{batch}"] = {
            **phase_result(step, prompts * samples, needed, limits.square),
            "products_alone_s": alone,
            "share_of_products": alone / step.median,
            "share_of_memory": reading / step.median,
        }
        decode_rows.append(
            [
                str(batch),
                f"{number(1e3 * step.median)} ms",
                f"{number(1e3 * alone)} ms",
                share(alone, step.median),
                share(reading, step.median),
            ]
        )
    steps = [side.step() for _ in range(rounds + 1)][1:]
    check_equal({f"step {i + 1}": step for i, step in enumerate(steps)}, same_prompts=False)
    training = Series(tuple(s["train_s"] for s in steps))
    needed, tokens = training_flops(model, work), training_tokens(work)
    rows.append(phase_row("training", training, tokens, needed, limits.square))
    results["training"] = {
        **phase_result(training, tokens, needed, limits.square),
        "share_of_training_products": needed / training.median / limits.training,
    }
    report.add_table(["phase", "time", "tokens/s", "needed", "GFLOP/s", "of 2048 cubed"], rows)
    report.add_table(["decode batch", "step", "products alone", "of their rate", "of memory read"], decode_rows)
    report.results["reached"] = results


def phase_row(name: str, time_s: Series, tokens: float, needed: float, limit: float) -> list[str]:
    rate = needed / time_s.median
    speed, work = number(tokens / time_s.median), f"{number(needed / 1e9)} GFLOP"
    return [name, time_s.text("s"), speed, work, number(rate / 1e9), share(rate, limit)]


def phase_result(time_s: Series, tokens: float, needed: float, limit: float) -> dict[str, Any]:
    rate = needed / time_s.median
    return {"time_s": time_s.to_json(), "tokens": tokens, "flops": needed, "rate": rate, "share": rate / limit}


def main(argv: list[str] | None = None) -> Report:
    options = parse(argv)
    work = make_workload(options, num_steps=options.rounds + 1)
    import torch
    from verl_side import VerlSide

    model = Decoder.of_folder(work.model)
    limits = Limits.measure(model, getattr(torch, work.dtype), options.batches)
    report = Report("Limits of this machine and what is reached")
    report.add_table(["limit", "measured"], limits.rows(model))
    report.results["limits"] = vars(limits)
    with tempfile.TemporaryDirectory(prefix="roofline-") as folder:
        side = VerlSide(work, Path(folder), options.ours)
        try:
            report.facts = {"workload": describe(work), "threads": torch.get_num_threads(), **side.facts()}
            fill_reached(report, side, work, limits, options)
        finally:
            side.close()
    after = Limits.measure(model, getattr(torch, work.dtype), [])
    drift = statistics.mean((after.square / limits.square, after.read / limits.read))
    report.notes.append(f"The limits measured again at the end were {number(drift)} times those at the start.")
    report.finish(options.json)
    return report


if __name__ == "__main__":
    raise SystemExit(as_verb(main))
