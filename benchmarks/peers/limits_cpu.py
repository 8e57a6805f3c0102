"""Each phase of a GRPO step against what the processor's products and memory allow, measured in the same process.

    python benchmarks/peers/limits_cpu.py --dtype bfloat16            # 8 prompts x 8 samples, 64 + 64 tokens
    python benchmarks/peers/limits_cpu.py --prompts 1 --samples 2 --rounds 1        # a small case

A phase's limit is the larger one of its products at the measured rate and its bytes at the measured rate; for the decode steps,
of each step. Its share is limit / time, and what is lost is the rest. Work that is reused counts as none.
"""

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peers_cpu import add_workload_options, describe, make_workload
from report import Report, number, series_of
from verl_side import VerlSide
from workload import Workload

from verl.models import forward, kernel_log_probs
from verl.models.optim import MasterOptimizer


def best_s(work: Callable[[], object], rounds: int = 5) -> float:
    """The fastest of several rounds, in seconds."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def machine_limits(dtype: str) -> tuple[float, float]:
    """(operations, bytes) a second: of the faster square product, in the dtype or float32, and of a matrix times a vector."""
    flops = 0.0
    for kind in {torch.float32, getattr(torch, dtype)}:
        a, b = torch.randn(2, 1536, 1536).to(kind)
        flops = max(flops, 2 * 1536**3 / best_s(lambda a=a, b=b: a @ b))  # type: ignore[misc]
    matrix, vector = torch.zeros(16384, 8192), torch.zeros(8192)
    return flops, matrix.nbytes / best_s(lambda: matrix @ vector)


def needs(work: Workload, module: Any) -> dict[str, list[tuple[float, float]]]:
    """(operations, bytes) of the parts of each phase, which follow each other."""
    config, item = module.config, getattr(torch, work.dtype).itemsize
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    weights = sum(p.numel() for p in module.get_decoder().layers.parameters())
    output = module.get_output_embeddings().weight.numel()
    per_key = 4 * config.num_hidden_layers * config.num_attention_heads * size  # of a token and a key that it sees
    rows, prompt, new = work.num_sequences, work.prompt_tokens, work.response_tokens
    prompts = work.num_prompts * (2 * weights * prompt + per_key * prompt**2 / 2)
    once = prompts + rows * new * (2 * weights + per_key * (prompt + new / 2))
    read, steps = float(item * (weights + output)), range(prompt + 1, prompt + new)
    decoding = [(rows * (2 * (weights + output) + per_key * length), read) for length in steps]
    # AdamW in float32 reads four numbers of a weight and writes three; a narrow weight is rounded
    optimizer = (weights + output) * (28.0 + (item if item < 4 else 0))
    return {
        "generate": [(prompts + 2 * output * work.num_prompts, read), *decoding], "forward": [(once, 0.0)],
        "head": [(6.0 * output * rows * new, 0.0)], "backward": [(2 * once, 0.0)], "optimizer": [(0.0, optimizer)],
    }  # fmt: skip


def timed(owner: Any, name: str, spent: dict[str, float], phase: str) -> None:
    """Count the seconds of a function in `phase`."""
    plain = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return plain(*arguments, **named)
        finally:
            spent[phase] += time.perf_counter() - began

    setattr(owner, name, staticmethod(call) if name == "backward" and owner is not MasterOptimizer else call)


def main(argv: list[str] | None = None) -> Report:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload_options(parser)
    options = parser.parse_args(argv)
    work = make_workload(options, num_steps=options.rounds + 1)
    spent, steps = defaultdict[str, float](float), []
    for owner, name, phase in (
        (forward, "dense_hidden_states", "forward"), (forward, "token_log_probs", "head"),
        (kernel_log_probs.KernelLogProbs, "backward", "head backward"),
        (MasterOptimizer, "backward", "backward"), (MasterOptimizer, "step", "optimizer"),
    ):  # fmt: skip
        timed(owner, name, spent, phase)
    flops, rate = machine_limits(work.dtype)
    with tempfile.TemporaryDirectory() as folder:
        side = VerlSide(work, Path(folder), options.ours)
        for number_of_step in range(options.rounds + 1):
            spent.clear()
            step = side.step()
            head = spent["head backward"]
            phases = {**spent, "head": spent["head"] + head, "backward": spent["backward"] - head}
            phases |= {"generate": step["generate_s"], "step": step["step_s"]}
            steps += [phases] if number_of_step else []
        phase_needs = needs(work, side.actor.engine.module)
    report = Report("Shares of the processor's limit", facts={"workload": describe(work), **side.facts()})
    report.facts |= {"products": f"{flops / 1e9:.0f} GFLOP/s", "memory": f"{rate / 1e9:.1f} GB/s"}
    rows, named = [], 0.0
    for phase, parts in phase_needs.items():
        seconds, limit = series_of(steps, phase).median, sum(max(f / flops, b / rate) for f, b in parts)
        named += seconds
        work_cells = [number(sum(p[i] for p in parts) / 1e9) for i in (0, 1)]
        rows.append(
            [phase, number(seconds), *work_cells, number(limit), f"{limit / seconds:.0%}", number(seconds - limit)]
        )
    total = series_of(steps, "step").median
    rows.append(["rest", number(total - named), "", "", "", "", number(total - named)])
    report.tables.append((["phase", "s", "GFLOP", "GB", "limit, s", "share", "lost, s"], rows))
    report.results = {"steps": steps, "flops": flops, "bytes_per_s": rate}
    report.finish(options.json)
    return report


if __name__ == "__main__":
    main()
