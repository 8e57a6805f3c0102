"""Peak memory of our GRPO step against a lower bound, and against TRL's step.

    python benchmarks/memory.py
    python benchmarks/memory.py --peer shipped best --json figures.json

Peak memory is the kernel's high-water mark of the process (and of its scoring process) over its whole life, loading and two
steps included. The bound is what any implementation of the same step must hold at once: the interpreter with its libraries
(measured), weights, Adam's two moments, and then the larger of the key-value cache (while generating) and gradients with
minimal activations (while training). Minimal activations are the inputs of every layer of one sequence: all else can be
computed again.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flops import Decoder
from peer import Peer
from peer_env import ensure
from peers_cpu import (
    OURS,
    TRL_FORMS,
    add_workload_options,
    check_equal,
    describe,
    make_workload,
    peak_bytes,
    start_trl,
    start_verl,
)
from report import Report, gigabytes, number
from workload import Workload


@dataclass(frozen=True)
class Bound:
    """Bytes that a step must hold, part by part."""

    interpreter: float
    weights: float
    optimizer: float
    gradients: float
    activations: float
    cache: float

    @classmethod
    def of(cls, work: Workload, num_parameters: int, interpreter: float) -> Bound:
        """float32 weights, gradients and moments; in bfloat16 the weights once more, in that format."""
        model, narrow = Decoder.of_folder(work.model), work.dtype == "bfloat16"
        width = 2 if narrow else 4
        sequence = work.prompt_tokens + work.response_tokens
        cached = work.num_prompts * (work.prompt_tokens + work.num_samples * work.response_tokens)
        return cls(
            interpreter=interpreter,
            weights=num_parameters * (4 + (2 if narrow else 0)),
            optimizer=8.0 * num_parameters,
            gradients=4.0 * num_parameters,
            activations=float(width * sequence * model.hidden * model.num_layers),
            cache=float(width * cached * model.kv_elements_per_token),
        )

    @property
    def total(self) -> float:
        return self.interpreter + self.weights + self.optimizer + max(self.cache, self.gradients + self.activations)

    def rows(self) -> list[list[str]]:
        return [
            ["interpreter and libraries (measured)", gigabytes(self.interpreter)],
            ["weights", gigabytes(self.weights)],
            ["optimizer", gigabytes(self.optimizer)],
            ["gradients (training)", gigabytes(self.gradients)],
            ["minimal activations (training)", gigabytes(self.activations)],
            ["key-value cache (generation)", gigabytes(self.cache)],
            ["held at once, at least", gigabytes(self.total)],
        ]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload_options(parser)
    parser.add_argument("--rounds", type=int, default=2, help="steps of each side; the peak is over all of them")
    parser.add_argument("--peer", nargs="*", choices=sorted(TRL_FORMS), default=[], help="forms of TRL to run too")
    parser.add_argument("--trl-env", type=Path, help="TRL's environment (made if absent; default under work/)")
    parser.add_argument("--trl-micro-batch", type=int, help="samples in a micro-batch of every form of TRL")
    parser.add_argument(
        "--trl-set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of every form's config"
    )
    parser.add_argument("--ours", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of our config")
    return parser.parse_args(argv)


def run_alone(peer: Peer, rounds: int, limit_s: float) -> list[dict[str, Any]]:
    """`rounds` steps; then the process ends, so that the next one has the machine's memory."""
    with peer:
        return [peer.ask("step", limit_s) for _ in range(rounds)]


def main(argv: list[str] | None = None) -> Report:
    options = parse(argv)
    if options.peer:
        ensure("trl", options.trl_env)
    work = make_workload(options, num_steps=options.rounds)
    report = Report("Peak memory of a GRPO step")
    peaks: dict[str, float] = {}
    with ExitStack() as stack:
        logs = options.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="memory-")))
        ours = start_verl(stack, work, logs, options.limit_s, options.ours)
        rounds = run_alone(ours, options.rounds, options.limit_s)
        peaks[OURS] = peak_bytes(rounds)
        for form in dict.fromkeys(options.peer):
            peer = start_trl(stack, work, logs, options, form)
            found = run_alone(peer, options.rounds, options.limit_s)
            check_equal({OURS: rounds[-1], peer.name: found[-1]})
            peaks[peer.name] = peak_bytes(found)
    bound = Bound.of(work, ours.facts["parameters"], ours.bare["peak_rss_bytes"])
    report.facts = {"workload": describe(work), OURS: ours.facts}
    report.add_table(["part of the bound", "bytes"], bound.rows())
    report.add_table(
        ["side", "peak", "of the bound", f"of {OURS}"],
        [
            [name, gigabytes(peak), f"{number(peak / bound.total)}x", f"{number(peak / peaks[OURS])}x"]
            for name, peak in peaks.items()
        ],
    )
    report.results = {"bound_bytes": {**vars(bound), "total": bound.total}, "peak_rss_bytes": peaks}
    report.finish(options.json)
    return report


if __name__ == "__main__":
    main()
