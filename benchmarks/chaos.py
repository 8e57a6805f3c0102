"""Runs of `verl train` whose processes are killed at random moments, against a run of the same work that was left alone.

    python benchmarks/chaos.py --kills 100 --runtimes local async torchrun ray --seed 1 --json chaos.json
    python benchmarks/chaos.py --kills 10 --runtimes local --kills-per-run 10

Each run gets several SIGKILLs (see chaos_run.py: targets and moments are drawn from the seed). What comes back by itself is
left to itself; when the whole command is dead (its supervisor or launcher was killed, or gave up), the same command is run
again, as a person would. At its end every run must have the weights and optimizer state of the run that was left alone, bit
for bit, must have trained on the same multiset of samples, and must have left no process behind. Exit code 1: one did not.

Time to recover is from the kill until the step in which it came is being taken again; work lost is the number of steps that
were taken again. Both runs are of a tiny model whose steps take a part of a second, so the time is that of starting.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent))

from chaos_run import RUNTIMES, Kill, Lost, Task, Victim, differences, make_task, plan
from report import number, table

# how many of the kills a runtime gets for each of another's: starting again takes longest on Ray
_SHARES = {"local": 4, "async": 2, "torchrun": 2, "ray": 2}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    kills: list[Kill] = []
    failures: list[str] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="verl-chaos-") as scratch:
        folder = Path(arguments.keep or scratch)
        task = make_task(folder, steps=arguments.kills_per_run + 2, model=arguments.model, warm=arguments.warm)
        for runtime, count in shares(arguments.runtimes, arguments.kills).items():
            found, wrong = attack(task, runtime, count, arguments)
            kills += found
            failures += wrong
    print(report(kills))
    seconds = time.monotonic() - began
    print(
        f"\n{len(kills)} kills in {seconds / 60:.1f} min; {len(failures)} runs differ from the one that was left alone."
    )
    for failure in failures:
        print(f"FAILED {failure}")
    if arguments.json:
        rows = {"seed": arguments.seed, "seconds": seconds, "failures": failures, "kills": [asdict(k) for k in kills]}
        Path(arguments.json).write_text(json.dumps(rows, indent=2) + "\n")
    return 1 if failures else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--runtimes", nargs="+", choices=sorted(RUNTIMES), default=list(_SHARES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills-per-run", type=int, default=10)
    parser.add_argument("--targets", nargs="+", help="kill only these (default: what the runtime has)")
    parser.add_argument("--model", help="model folder (default: a tiny random one)")
    parser.add_argument("--warm", action="store_true", help="the supervisor imports torch once, for all restarts")
    parser.add_argument("--keep", metavar="FOLDER", help="leave the run folders there")
    parser.add_argument("--json", help="file for the figures")
    return parser.parse_args(argv)


def shares(runtimes: Sequence[str], kills: int) -> dict[str, int]:
    """Kills of each runtime; they add up to `kills`."""
    left, weights, found = kills, sum(_SHARES[r] for r in runtimes), {}
    for runtime in runtimes:
        found[runtime] = round(left * _SHARES[runtime] / weights)
        left -= found[runtime]
        weights -= _SHARES[runtime]
    return found


def attack(task: Task, runtime: str, count: int, arguments: argparse.Namespace) -> tuple[list[Kill], list[str]]:
    """Runs of one runtime with `count` kills in all; (the kills, what went wrong)."""
    if count == 0:
        return [], []
    kills: list[Kill] = []
    failures: list[str] = []
    alone = Victim(task, runtime, "alone")
    alone.to_the_end()
    for index in itertools.count():
        if len(kills) >= count:
            break
        seed = f"{arguments.seed}/{runtime}/{index}"
        rng = random.Random(seed)
        victim = Victim(task, runtime, f"killed-{index}")
        planned = plan(rng, runtime, min(arguments.kills_per_run, count - len(kills)), arguments.targets)
        try:
            for moment in planned:
                kill = victim.strike(moment, rng)
                if kill is None:
                    break
                kills.append(kill)
                _tell(kill)
            victim.to_the_end()
            wrong = differences(victim, alone)
        except Lost as error:
            wrong = [str(error)]
        finally:
            victim.end()
        failures += [f"{runtime}, run {victim.folder.name}, seed {seed}: {what}" for what in wrong]
        if wrong and len(kills) < count and victim.num_kills == 0:
            break  # it does not even start
    return kills, failures


def _tell(kill: Kill) -> None:
    print(
        f"{kill.runtime:<9} {kill.target:<14} step {kill.step:>2} {kill.phase:<16} back by {kill.back_by:<10} after "
        f"{kill.recovered_s:5.1f} s, {kill.steps_again} steps again",
        flush=True,
    )


def report(kills: Sequence[Kill]) -> str:
    """Tables of the kills by target and by phase."""
    header = ("", "kills", "s to recover", "most", "steps again", "most")
    parts = []
    for title, name in (("by target", lambda k: f"{k.runtime}: {k.target}"), ("by phase", lambda k: k.phase)):
        groups: dict[str, list[Kill]] = defaultdict(list)
        for kill in kills:
            groups[name(kill)].append(kill)
        rows = [(label, *_figures(found)) for label, found in sorted(groups.items())]
        parts.append(f"{title}\n{table(header, [*rows, ('all', *_figures(kills))])}")
    return "\n" + "\n\n".join(parts)


def _figures(kills: Sequence[Kill]) -> tuple[str, ...]:
    def both(values: Iterable[float]) -> tuple[str, str]:
        values = list(values)
        return (number(fmean(values)), number(max(values))) if values else ("-", "-")

    return (str(len(kills)), *both(k.recovered_s for k in kills), *both(k.steps_again for k in kills))


if __name__ == "__main__":
    raise SystemExit(main())
