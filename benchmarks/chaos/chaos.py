"""Runs of `verl train` whose processes are killed at random moments, against an undisturbed run of the same work.

    python benchmarks/chaos/chaos.py --kills 100 --seed 1 --json chaos.json
    python benchmarks/chaos/chaos.py --kills 24 --runtimes megatron zero3   with the extras of these engines
    python benchmarks/chaos/chaos.py --kills 12 --runtimes ray-scaled --kills-per-run 12   see chaos_scale.py
    python benchmarks/chaos/chaos.py --kills 16 --kills-per-run 3 --before-first-checkpoint 0.34
    python benchmarks/chaos/chaos.py --kills 12 --program preference     DPO; reward_model: a reward model
    python benchmarks/chaos/chaos.py --kills 12 --program images --runtimes local     prompts with pictures
    python benchmarks/chaos/chaos.py --kills 12 --runtimes local --set KEY=VALUE     keys of the killed runs
    python benchmarks/chaos/chaos.py --kills 12 --runtimes agents --drafts ngram model   drafts in the killed runs

Each run gets several SIGKILLs; the seed determines their moments and kinds of processes (chaos_task.py). A kill counts when it
hit a living process. Runs recover by themselves. Only when the first process of the command (its supervisor or launcher) was
killed, the script runs the same command again, as a person would. A command that ends with its own error has failed. At the
end every run must have the undisturbed run's last checkpoint (weights, optimizer), bit for bit, must have trained on the same
multiset of samples, and must have left nothing behind. Exit code 1: a run did not.
For agents, no result of a tool may be recorded twice, and only calls that a kill has cut may be made again.
With --drafts the undisturbed run has none, and each killed run must have tried some (chaos_drafts.py).

Time to recover is from the kill until the interrupted step is being taken again; work lost is the number of steps that were
taken again. All runs train a tiny model whose steps take a fraction of a second, so recovery time is start-up time.
"""

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

sys.path.extend(map(str, Path(__file__).resolve().parents[:2]))

from chaos_compare import differences, idleness, repeated_calls, tried_drafts
from chaos_run import Kill, Lost, Victim
from chaos_scale import RUNTIME as SCALED
from chaos_scale import ScaledVictim
from chaos_task import PHASES, PROGRAMS, RUNTIMES, Task, make_task
from chaos_tools import CALLS
from report import number, table

# how many of the kills a runtime gets for each of another's; the others get 8
_SHARES = {"local": 30, "engine": 16, "async": 16, "ray": 10, "ray-apart": 10, "agents-engine": 6}
_SHARES |= dict.fromkeys(("torchrun", "megatron", "zero3"), 18)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    kills: list[Kill] = []
    failures: list[str] = []
    drafts: Counter[str] = Counter()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="verl-chaos-") as scratch:
        folder, steps = Path(arguments.keep or scratch), 3 * arguments.kills_per_run + 2
        kinds = {"dtype": arguments.dtype, "program": arguments.program, "drafts": arguments.drafts}
        task = make_task(folder, steps=steps, changes=arguments.set, **kinds)
        for runtime, count in shares(arguments.runtimes, arguments.kills).items():
            try:
                attack(task, runtime, count, arguments, kills, failures, drafts)
            except Lost as error:
                failures.append(f"{runtime}, the undisturbed run: {error}")
            _write(arguments, time.monotonic() - began, kills, failures)
    minutes, early = (time.monotonic() - began) / 60, sum(kill.early for kill in kills)
    print(f"{report(kills)}\n\n{len(kills)} kills, {early} before a first checkpoint, in {minutes:.1f} min.")
    if arguments.drafts:
        print(f"Drafts of killed runs: {drafts['tried']} tried, {drafts['accepted']} accepted.")
    print(f"{len(failures)} differences from undisturbed runs.")
    print("".join(f"FAILED {failure}\n" for failure in failures), end="")
    return 1 if failures else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--program", choices=sorted(PROGRAMS), default="ppo")
    parser.add_argument("--runtimes", nargs="+", choices=sorted(RUNTIMES), help="default: all that need no extra")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills-per-run", type=int, default=10)
    parser.add_argument("--targets", nargs="+", help="kill only these (default: what the runtime has)")
    parser.add_argument("--phases", nargs="+", choices=PHASES, help="kill only in these (default: all of a step)")
    parser.add_argument(
        "--before-first-checkpoint", type=float, metavar="SHARE",
        help="probability that a kill comes before the first checkpoint, and not after it (default: kills in the first steps)",
    )  # fmt: skip
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the computation")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE",
        help="keys of the killed runs that must change no bit; MODEL stands for the folder of the model",
    )  # fmt: skip
    parser.add_argument(
        "--drafts", nargs="+", default=[], metavar="METHOD", choices=("ngram", "history", "model", "mtp"),
        help="drafts in the killed runs, whatever they cost; the model drafts for itself, as it was at the start",
    )  # fmt: skip
    parser.add_argument("--keep", metavar="FOLDER", help="leave the run folders there")
    parser.add_argument("--json", help="file for the figures, written after each runtime")
    arguments = parser.parse_args(argv)
    runtimes = PROGRAMS[arguments.program].runtimes
    arguments.runtimes = arguments.runtimes or [name for name in runtimes if not RUNTIMES[name].needs]
    if unknown := [name for name in arguments.runtimes if name not in runtimes]:
        parser.error(f"the program {arguments.program} generates nothing, so it has no runtime {', '.join(unknown)}")
    return arguments


def shares(runtimes: Sequence[str], kills: int) -> dict[str, int]:
    """Kills of each runtime that gets some; they add up to `kills`."""
    parts = {runtime: _SHARES.get(runtime, 8) for runtime in runtimes}
    remaining, weights, counts = kills, sum(parts.values()), {}
    for runtime, part in parts.items():
        counts[runtime] = round(remaining * part / weights)
        remaining, weights = remaining - counts[runtime], weights - part
    return {runtime: count for runtime, count in counts.items() if count}


def attack(
    task: Task, runtime: str, count: int, arguments: argparse.Namespace, kills: list[Kill], failures: list[str],
    drafts: Counter[str],
) -> None:  # fmt: skip
    """Runs of one runtime with `count` kills in all. Adds the kills to `kills`, the errors to `failures`, and the numbers of
    drafts to `drafts`. Raises Lost when the undisturbed run does not end."""
    kind = ScaledVictim if runtime == SCALED else Victim
    task = task.lasting(RUNTIMES[runtime].steps_of_a_kill * arguments.kills_per_run + 2)
    alone = kind(replace(task, changes=()), runtime, "alone")
    try:
        alone.to_the_end()
    finally:
        alone.end()
    failures += [f"{runtime}, the undisturbed run: {what}" for what in idleness(task, alone.folder)]
    target, usual_s = len(kills) + count, alone.usual()
    for index in itertools.count():
        if len(kills) >= target:
            break
        seed = f"{arguments.seed}/{runtime}/{index}"
        before, victim = len(kills), kind(task, runtime, f"killed-{index}", usual_s)
        try:
            num_hits = min(arguments.kills_per_run, target - len(kills))
            for hits in victim.strikes(random.Random(seed), num_hits, arguments):
                kills += hits
                _tell(hits)
            victim.to_the_end()
            survivors = [f"a process is left: {command}" for command in victim.left_in_the_end()]
            wrong = differences(task, victim.folder, alone.folder) + survivors
            if arguments.drafts:
                tried = tried_drafts(victim.folder)
                drafts += tried
                wrong += [] if tried["tried"] else ["no draft was tried"]
            if (alone.folder / CALLS).exists():
                wrong += repeated_calls(victim.folder, alone.folder, len(kills) - before)
        except Lost as error:
            wrong = [str(error)]
        finally:
            victim.end()
        print(f"{runtime} {victim.folder.name}: {'; '.join(wrong) or 'equal'}", flush=True)
        wrong += ["nothing could be killed"] if len(kills) == before else []
        failures += [f"{runtime}, run {victim.folder.name}, seed {seed}: {what}" for what in wrong]
        if len(kills) == before:
            break


def _tell(kills: Sequence[Kill]) -> None:
    for kill in kills:
        back = f"back by {kill.back_by}" if kill.recovered_s is not None else kill.back_by
        took = "" if kill.recovered_s is None else f" after {kill.recovered_s:.1f} s, {kill.steps_again} steps again"
        print(f"{kill.runtime:<9} {kill.target:<14} step {kill.step:>2} {kill.phase:<22} {back}{took}", flush=True)


def _write(arguments: argparse.Namespace, seconds: float, kills: Sequence[Kill], failures: Sequence[str]) -> None:
    if arguments.json:
        rows = {"seed": arguments.seed, "seconds": seconds, "failures": failures, "kills": [asdict(k) for k in kills]}
        Path(arguments.json).write_text(json.dumps(rows, indent=2) + "\n")


def report(kills: Sequence[Kill]) -> str:
    """Tables of the kills by target, by phase, and by what brought the run back."""
    header = ("", "kills", "s to recover", "most", "steps again", "most")
    parts = []
    for title, name in (
        ("by target", lambda k: f"{k.runtime}: {k.target}"),
        ("by phase", lambda k: k.phase),
        ("by what brought it back", lambda k: k.back_by),
    ):
        groups: dict[str, list[Kill]] = defaultdict(list)
        for kill in kills:
            groups[name(kill)].append(kill)
        rows = [(label, *_figures(members)) for label, members in sorted(groups.items())]
        parts.append(f"{title}\n{table(header, [*rows, ('all', *_figures(kills))])}")
    return "\n" + "\n\n".join(parts)


def _figures(kills: Sequence[Kill]) -> tuple[str, ...]:
    def both(values: Iterable[float | None]) -> tuple[str, str]:
        numbers = [value for value in values if value is not None]
        return (number(fmean(numbers)), number(max(numbers))) if numbers else ("-", "-")

    return (str(len(kills)), *both(k.recovered_s for k in kills), *both(k.steps_again for k in kills))


if __name__ == "__main__":
    raise SystemExit(main())
