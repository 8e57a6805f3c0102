"""What it costs that nothing is lost: the step of a run with all of it on against the same step with it off.

    python benchmarks/safety_cost.py                                        # SmolLM2-135M, 8 x 8 samples of 64 + 64 tokens
    python benchmarks/safety_cost.py --prompts 4 --samples 4 --response-tokens 32 --steps 6 --rounds 5
    python benchmarks/safety_cost.py --off ledger                           # the cost of one part

On: the sample ledger with its digests and its writer, guards of columns and optimizer steps (with limits, so that signs are
computed), the heartbeat that the supervisor watches, and deterministic algorithms. Off: none of them, by patches that only this
script makes; a run of one process keeps one set of weights, so there are no digests of an update in either.

Both sides are whole runs in this process, with the same seed, so that step k of one is the work of step k of the other. They
take turns, and who goes first alternates. Seconds of a step run from the end of the one before to its own end, records
included; the first step of each run is left out. The ratio is that of the medians over rounds, step by step; its median is
printed, with the first and third quartile of the steps. Exit code 1: more than --limit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from as_verb import as_verb
from peers_cpu import add_workload_options, make_workload
from report import Report, Series

WARM_UP = 1  # steps of each run that do not count
# limits that no healthy run reaches: what is measured is the looking
LIMITS = {"grad_norm": 1e9, "policy_kl": 1e9, "ratio": 1e9, "entropy": 1e-9, "mismatch": 2.0}

Rounds = dict[str, list[list[float]]]  # side -> seconds [round][step]


def main() -> None:
    arguments = _parse(sys.argv[1:])
    report = measure(arguments)
    report.finish(arguments.json)
    if report.results["cost"] > arguments.limit:
        raise SystemExit(1)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload_options(parser)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side")
    parser.add_argument("--steps", type=int, default=4, help="of each run, warm-up included")
    parser.add_argument("--off", nargs="+", choices=list(PARTS), default=list(PARTS), help="what one side is without")
    parser.add_argument("--limit", type=float, default=0.03, help="largest cost, as a share of the step without")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a further key for both sides")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1 or arguments.steps < WARM_UP + 2:
        parser.error(f"at least --rounds 1 and --steps {WARM_UP + 2} are needed")
    return arguments


def measure(arguments: argparse.Namespace) -> Report:
    """All rounds of both sides."""
    from verl_side import overrides_of, write_prompts

    work = make_workload(arguments, arguments.steps)
    found: Rounds = {"on": [], "off": []}
    with tempfile.TemporaryDirectory(prefix="verl-safety-") as scratch:
        folder = Path(scratch)
        write_prompts(work, folder)
        common = overrides_of(work, folder, arguments.set)
        for number in range(arguments.rounds):
            for side in ("on", "off") if number % 2 == 0 else ("off", "on"):
                run = folder / f"{number}-{side}"
                found[side].append(step_seconds(train(run, common, () if side == "on" else arguments.off)))
    report = Report("What it costs that nothing is lost", facts=_facts(arguments))
    return conclude(report, found)


def _facts(arguments: argparse.Namespace) -> dict[str, Any]:
    tokens = f"{arguments.prompt_tokens} + {arguments.response_tokens} tokens"
    return {
        "model": str(arguments.model),
        "step": f"{arguments.prompts} x {arguments.samples} samples of {tokens}, {arguments.dtype}",
        "off": ", ".join(arguments.off),
        "rounds": arguments.rounds,
        "steps that count": arguments.steps - WARM_UP,
    }


def train(run: Path, common: Sequence[str], without: Sequence[str]) -> list[dict[str, Any]]:
    """A run in this process, and its metrics."""
    from verl.config import load_config
    from verl.trainer.run import train as train_run

    limits = () if "guards" in without else tuple(f"trainer.guards.{n}.limit={v}" for n, v in LIMITS.items())
    settings = (
        f"trainer.default_local_dir={run}",
        "trainer.logger=[file]",
        "trainer.val_before_train=False",
        f"trainer.deterministic={'determinism' not in without}",
    )
    with ExitStack() as stack:
        for part in without:
            PARTS[part](stack)
        train_run(load_config([*common, *settings, *limits]))
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def step_seconds(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Between the rows of two steps that follow one another."""
    times = [row["time"] for row in rows if row["step"] >= WARM_UP]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def conclude(report: Report, found: Rounds) -> Report:
    """Medians and ratios of all rounds, step by step."""
    ratios, rows = [], []
    for step in range(len(found["on"][0])):
        on, off = (Series(tuple(seconds[step] for seconds in found[side])) for side in ("on", "off"))
        ratios.append(on.median / off.median)
        rows.append([f"step {step + WARM_UP + 1}", on.text("s"), off.text("s"), f"{ratios[-1]:.4f}"])
    median = statistics.median(ratios)
    spread = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [median] * 3
    report.add_table(["", "on", "off", "on / off"], rows)
    report.notes.append(f"on / off: {median:.4f} (half of the steps between {spread[0]:.4f} and {spread[2]:.4f})")
    report.results = {"cost": median - 1, "quartiles": [q - 1 for q in spread], "ratios": ratios, "seconds": found}
    return report


# -- what one side is without


def _no_ledger(stack: ExitStack) -> None:
    """A book that only counts, and no file."""
    from verl.tracking.ledger_book import Offset, SampleBook
    from verl.trainer import resuming
    from verl.trainer.ppo import collect, program

    class Counting(SampleBook):
        def issue(self, step: int, prompts: Any, **_: Any) -> None:
            self.num_issued = getattr(self, "num_issued", 0) + len(prompts)

        def generate(self, step: int, pieces: Any) -> None: ...

        def score(self, step: int, scores: Any) -> None: ...

        def train(self, step: int, keys: Any) -> None:
            self.offset = Offset(step, self.num_issued)

    for name in ("issued_prompts", "pieces_of", "scores_of"):
        stack.enter_context(patch.object(collect, name, lambda rows, *_: rows))
    stack.enter_context(patch.object(program, "keys_of", lambda rows: rows))
    stack.enter_context(patch.object(program, "SampleBook", Counting))
    stack.enter_context(patch.object(resuming, "begin_samples", lambda *_: []))


def _no_guards(stack: ExitStack) -> None:
    from verl.trainer.guards import Guards
    from verl.workers.step_guard import StepGuard

    for method in ("check_samples", "check_credit", "check_updates"):
        stack.enter_context(patch.object(Guards, method, lambda *_: None))
    stack.enter_context(patch.object(StepGuard, "observe", lambda *_: {}))
    stack.enter_context(patch.object(StepGuard, "__call__", lambda *_: True))
    stack.enter_context(patch.object(StepGuard, "names", {}))


def _no_heartbeat(stack: ExitStack) -> None:
    from verl.tracking.heartbeat import Heartbeat

    for method in ("start", "phase", "begin_step"):
        stack.enter_context(patch.object(Heartbeat, method, lambda *_: None))


def _no_determinism(stack: ExitStack) -> None:
    """The runs of the other side have switched it on in this process."""
    import torch

    torch.use_deterministic_algorithms(False)


PARTS: dict[str, Callable[[ExitStack], None]] = {
    "ledger": _no_ledger,
    "guards": _no_guards,
    "heartbeat": _no_heartbeat,
    "determinism": _no_determinism,
}

if __name__ == "__main__":
    raise SystemExit(as_verb(main))
