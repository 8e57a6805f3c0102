"""Cost of the safety features: steps of a run with all of them on against the same steps with them off, and an account.

    python benchmarks/safety_cost.py                        # SmolLM2-135M, 24 pairs of steps: 4 x 4 samples of 64 + 32 tokens
    python benchmarks/safety_cost.py --pairs 6 --prompts 8 --samples 8 --response-tokens 64
    python benchmarks/safety_cost.py --off determinism       # the cost of one part

On: the sample ledger with its digests and its writer, guards of columns and optimizer steps (with limits, so that signs are
computed), the heartbeat that the supervisor watches, and deterministic algorithms. Off: none of them, by patches that only this
script makes; a run of one process keeps one set of weights, so there are no digests of an update in either.

Both sides are whole runs in separate processes, held before each step, with the same seed: step k of one side is the work of
step k of the other. They take turns step by step, and the first side alternates, so that a slower host affects both equally.
The first result is the median of on / off over the pairs, with its standard error (for the median of normally distributed
ratios).

The second result, the account, is exact on any host: seconds that a step with all features on spends inside functions of the
ledger, the guards and the heartbeat, and processor seconds of the thread that writes the ledger, as a share of that step. It
excludes their indirect cost: deterministic kernels, and the entropy that the model returns because a guard limits it.

Exit code 1: the account, or the first result by more than twice its error, is above --limit.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from child_safety import PARTS
from peer import Peer
from peers_cpu import Unequal, add_workload_options, make_workload
from report import Report, Series, number

WARM_UP = 2  # pairs that do not count
_ERROR_OF_A_MEDIAN = math.sqrt(math.pi / 2)  # times the error of the mean

Answer = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    report = measure(arguments)
    report.finish(arguments.json)
    found = report.results
    return int(found["account"] > arguments.limit or found["cost"] - 2 * found["error"] > arguments.limit)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload_options(parser, response_tokens=32)
    parser.set_defaults(prompts=4, samples=4)
    parser.add_argument("--pairs", type=int, default=24, help="steps of each side that count")
    parser.add_argument("--off", nargs="+", choices=PARTS, default=list(PARTS), help="what one side is without")
    parser.add_argument("--limit", type=float, default=0.03, help="largest cost, as a share of the step")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a further key for both sides")
    arguments = parser.parse_args(argv)
    if arguments.pairs < 2:
        parser.error("at least --pairs 2 are needed")
    return arguments


def measure(arguments: argparse.Namespace) -> Report:
    """All pairs of steps."""
    work = make_workload(arguments, arguments.pairs + WARM_UP)
    report = Report("What it costs that nothing is lost", facts=_facts(arguments))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="verl-safety-")))
        sides = []
        for name, without in (("on", []), ("off", arguments.off)):
            log = (arguments.logs or folder) / f"safety-{name}.log"
            side = stack.enter_context(Peer(name, "child_safety.py", log=log))
            side.build(
                arguments.limit_s,
                work=work.to_json(),
                folder=str(folder / name),
                extra=arguments.set,
                without=without,
            )
            sides.append(side)
        report.facts["threads"] = sides[0].facts.get("threads")
        pairs = [_pair(sides if k % 2 else sides[::-1], arguments.limit_s) for k in range(arguments.pairs + WARM_UP)]
    return conclude(report, pairs[WARM_UP:])


def _facts(arguments: argparse.Namespace) -> dict[str, Any]:
    tokens = f"{arguments.prompt_tokens} + {arguments.response_tokens} tokens"
    return {
        "model": str(arguments.model),
        "step": f"{arguments.prompts} x {arguments.samples} samples of {tokens}, {arguments.dtype}",
        "off": ", ".join(arguments.off),
        "pairs of steps": arguments.pairs,
    }


def _pair(sides: Sequence[Peer], limit_s: float) -> dict[str, Answer]:
    """A step of each side, one after the other. Raises Unequal when they were not the same work."""
    answers = {side.name: side.ask("step", limit_s) for side in sides}
    for name in ("perf/total_num_tokens", "training/next_ordinal"):
        if answers["on"][name] != answers["off"][name]:
            raise Unequal(f"The sides did different work: {name} is {[a[name] for a in answers.values()]}.")
    print("  ".join(f"{name} {answers[name]['step_s']:.2f} s" for name in ("on", "off")), file=sys.stderr, flush=True)
    return answers


def conclude(report: Report, pairs: Sequence[dict[str, Answer]]) -> Report:
    """The ratio of the sides, and the parts' share of the step that has them."""
    on, off = (Series(tuple(pair[name]["step_s"] for pair in pairs)) for name in ("on", "off"))
    ratios = [pair["on"]["step_s"] / pair["off"]["step_s"] for pair in pairs]
    median = statistics.median(ratios)
    error = _ERROR_OF_A_MEDIAN * statistics.stdev(ratios) / math.sqrt(len(ratios))
    low, _, high = statistics.quantiles(ratios, n=4)
    report.add_table(
        ["", "on", "off", "on / off", "half of the pairs"],
        [["step", on.text("s"), off.text("s"), f"{median:.4f} ± {error:.4f}", f"{low:.4f} to {high:.4f}"]],
    )
    total_s = sum(on.values)
    seconds = {part: sum(pair["on"]["parts"][part] for pair in pairs) for part in pairs[0]["on"]["parts"]}
    shares = {part: spent / total_s for part, spent in seconds.items()}
    report.add_table(
        ["account", "ms a step", "of the step"],
        [[p, number(1000 * s / len(pairs)), f"{shares[p]:.3%}"] for p, s in seconds.items()]
        + [["all", number(1000 * sum(seconds.values()) / len(pairs)), f"{sum(shares.values()):.3%}"]],
    )
    same = sum(pair["on"]["actor/grad_norm"] == pair["off"]["actor/grad_norm"] for pair in pairs)
    report.notes.append(f"Gradient norms of the two sides are equal to the last bit in {same} of {len(pairs)} steps.")
    report.results = {
        "cost": median - 1,
        "error": error,
        "quartiles": [low - 1, high - 1],
        "account": sum(shares.values()),
        "shares": shares,
        "seconds": {"on": on.values, "off": off.values},
    }
    return report


if __name__ == "__main__":
    raise SystemExit(main())
