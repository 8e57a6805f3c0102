"""Speed of one of our processes and of two at once on the same cores, by OpenMP's wait policy.

    python benchmarks/side_by_side.py --dtype bfloat16                  # 8 prompts x 8 samples, 64 + 24 tokens
    python benchmarks/side_by_side.py --phase step --json figures.json  # whole GRPO steps, training included

Both processes use every core. The report has tokens per second of generation, or sequences per second of steps, and the joint
rate of two processes as a share of the rate of a single process. `as shipped` leaves the environment as it is.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from peer import Peer
from peers_cpu import add_workload_options, describe, make_workload
from report import Report, Series, number
from workload import Workload

AS_SHIPPED = "as shipped"
SETTINGS = {
    AS_SHIPPED: {},
    "GOMP_SPINCOUNT=100000": {"GOMP_SPINCOUNT": "100000"},
    "GOMP_SPINCOUNT=10000": {"GOMP_SPINCOUNT": "10000"},
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload_options(parser, response_tokens=24)
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds of each form (after one to warm up)")
    parser.add_argument("--phase", choices=("generate", "step"), default="generate")
    parser.add_argument("--settings", nargs="*", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--ours", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of our config")
    return parser.parse_args(argv)


def start(stack: ExitStack, options: argparse.Namespace, work: Workload, logs: Path, setting: str) -> list[Peer]:
    """Two processes under a setting, built."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        os.environ.pop(name, None)  # the children inherit the environment
    peers = [
        stack.enter_context(Peer(name, "child_verl.py", log=logs / f"{name}.log", environment=SETTINGS[setting]))
        for name in ("first", "second")
    ]
    for peer in peers:
        peer.build(options.limit_s, work=work.to_json(), folder=str(logs / peer.name), overrides=options.ours)
    return peers


def rate(peer: Peer, work: Workload, phase: str, number_of_round: int, limit_s: float) -> float:
    if phase == "generate":
        return work.num_new_tokens / peer.ask("generate", limit_s, step=number_of_round)["generate_s"]
    return work.num_sequences / peer.ask("step", limit_s)["step_s"]


def measure(options: argparse.Namespace, work: Workload, setting: str) -> dict[str, Series]:
    """Rates of a single process, of each of two at once, and of both together."""
    rates: dict[str, list[float]] = {"alone": [], "each": [], "together": []}
    with ExitStack() as stack:
        logs = Path(options.logs or stack.enter_context(tempfile.TemporaryDirectory(prefix="side-by-side-")))
        pool = stack.enter_context(ThreadPoolExecutor(2))
        peers = start(stack, options, work, logs / setting.replace(" ", "-"), setting)
        for number_of_round in range(options.rounds + 1):
            arguments = (work, options.phase, number_of_round, options.limit_s)
            alone = rate(peers[0], *arguments)
            both = list(pool.map(lambda peer, given=arguments: rate(peer, *given), peers))
            print(f"{setting}: {alone:.1f} alone, {both} at once", file=sys.stderr, flush=True)
            if number_of_round:
                rates["alone"].append(alone)
                rates["each"] += both
                rates["together"].append(sum(both))
    return {name: Series(tuple(values)) for name, values in rates.items()}


def main(argv: list[str] | None = None) -> Report:
    options = parse(argv)
    work = make_workload(options, num_steps=2 * options.rounds + 2)
    report = Report("One process and two at once")
    report.facts = {"workload": describe(work), "phase": options.phase, "cores": os.cpu_count()}
    measured = {setting: measure(options, work, setting) for setting in options.settings}
    best = max(series["alone"].median for series in measured.values())
    rows = [
        [
            setting,
            series["alone"].text(),
            f"{100 * series['alone'].median / best:.0f}%",
            f"{number(min(series['each'].values))} to {number(max(series['each'].values))}",
            f"{100 * series['together'].median / series['alone'].median:.0f}%",
        ]
        for setting, series in measured.items()
    ]
    unit = "tokens/s" if options.phase == "generate" else "sequences/s"
    report.add_table([f"waiting ({unit})", "one alone", "of best", "two at once, each", "both, of one alone"], rows)
    report.results = {
        setting: {name: s.to_json() for name, s in series.items()} for setting, series in measured.items()
    }
    report.finish(options.json)
    return report


if __name__ == "__main__":
    main()
