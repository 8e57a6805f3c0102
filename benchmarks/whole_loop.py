"""The whole PPO loop on two devices against one: placement, rollout on a separate device, samples ahead of training.

    python benchmarks/whole_loop.py                       # seven to nine minutes on two cores; needs the extra `ray`
    python benchmarks/whole_loop.py --reward program      # each sample is run as a program, with its tests
    python benchmarks/whole_loop.py --sides serial "groups, ahead" --rounds 3 --json out.json

A device is a process with one thread. Every side is a whole run of `verl train` of the same work (actor, critic, reference
policy, a reward that takes its time) with a random Llama of 4 million parameters in float32; they take turns.

- serial: one device, the roles one after the other, samples made right before they train. The baseline.
- ahead: the same with samples one step ahead, so that rewards are waited for while others train.
- groups: actor and rollout on one device, critic and reference on the other.
- groups, ahead: both.
- rollout apart: generation and rewards on a separate device; new weights travel by the resharding plan. The devices wait for
  each other.
- rollout apart, ahead: one generates while the other trains.
- rollout apart, ahead, gathered: the same, with whole weights gathered instead of the plan.

All sides use the sampler's old log-probs (rollout_correction.bypass_mode where samples are ahead), so that all do the same
work. "bound" is the largest speed-up that the serial run's own times allow that side: of two parallel phases the longer counts.
No step is shorter than the cores need for the processor time of the serial run and of the side's own processes outside the
devices. The column "outside" has the latter (driver, Ray, rewards), in seconds of a step. "share" is the reached share of the
bound. "busy" is the processor time of each device's process, as a share of the counted steps; waiting for scores is not busy.
"cores" is the processor time of all processes of the run, as a share of the machine's cores. "generation": seconds in which a
step waits for samples.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent))

from report import Report, Series, number, ratio
from runs import WARM_UP, Row, Side, by_tokens, make_model, measure, overrides, step_seconds, train

PROMPTS, PROMPT_TOKENS, RESPONSE_TOKENS = 8, 64, 64  # of a step
_AHEAD = (
    "actor_rollout_ref.rollout.prefetch_num=1",
    "algorithm.rollout_correction.bypass_mode=True",
    "algorithm.rollout_correction.rollout_is=null",
)
_GROUPS = ("trainer.placement={actor:[0],rollout:[0],reward:[0],critic:[1],reference:[1]}",)
_APART = ("trainer.placement={actor:[0],critic:[0],reference:[0],rollout:[1],reward:[1]}",)
SERIAL, APART = "serial", "rollout apart"
SIDES = (
    Side(SERIAL),
    Side("ahead", changes=_AHEAD),
    Side("groups", 2, changes=_GROUPS),
    Side("groups, ahead", 2, changes=(*_GROUPS, *_AHEAD)),
    Side(APART, 2, changes=_APART),
    Side(f"{APART}, ahead", 2, changes=(*_APART, *_AHEAD)),
    Side(
        f"{APART}, ahead, gathered", 2, changes=(*_APART, *_AHEAD, "actor_rollout_ref.model.external_lib=gathers_whole")
    ),
)
_SPANS = ("gen", "reward", "ref", "values", "update_actor", "update_critic")
_GATHERS_WHOLE = """
import verl.runtime.weight_sync as weight_sync

weight_sync.plan_update = lambda *_, **__: None
"""
PROGRAM = """
import json, subprocess, sys

TESTS = '''
import itertools, math
primes = [n for n in range(2, {size}) if all(n % d for d in range(2, math.isqrt(n) + 1))]
assert primes[:4] == [2, 3, 5, 7]
'''

def compute_score(data_source, solution_str, ground_truth, extra_info=None, seconds=0.3):
    program = f"answer = {{json.dumps(solution_str)}}\\n" + TESTS
    done = subprocess.run([sys.executable, "-I", "-c", program], timeout=20, check=False)
    share = sum(c.isalpha() for c in solution_str) / max(len(solution_str), 1)
    return share if done.returncode == 0 else -1.0
"""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    report = Report("The whole loop", facts=_facts(arguments))
    with tempfile.TemporaryDirectory(prefix="verl-loop-") as scratch:
        folder = Path(scratch)
        even = [[PROMPT_TOKENS] * arguments.samples for _ in range(arguments.steps)]
        common = overrides(make_model(folder), folder / "task", even, RESPONSE_TOKENS)
        common += by_tokens(arguments.samples * (PROMPT_TOKENS + RESPONSE_TOKENS))
        common += (
            f"reward.custom_reward_function.reward_kwargs.seconds={arguments.reward_seconds}",
            f"reward.num_workers={arguments.samples}",
        )
        if arguments.reward == "program":
            (folder / "task" / "reward.py").write_text(PROGRAM.format(size=arguments.program_size))
        (folder / "gathers_whole.py").write_text(_GATHERS_WHOLE)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        sides = [side for side in SIDES if side.name in (SERIAL, *arguments.sides)]
        fill(report, measure(sides, common, arguments.rounds, folder / "runs", watched), arguments.samples)
    report.finish(arguments.json)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [side.name for side in SIDES]
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side")
    parser.add_argument("--steps", type=int, default=7, help="of each run, warm-up included")
    parser.add_argument("--samples", type=int, default=PROMPTS, help="of a step")
    parser.add_argument("--sides", nargs="+", choices=names, default=names, metavar="SIDE", help="beside serial")
    parser.add_argument("--reward", choices=("service", "program"), default="service", help="waits for, or computes")
    parser.add_argument("--program-size", type=int, default=10_000, help="numbers that a program of --reward tests")
    parser.add_argument("--reward-seconds", type=float, default=0.3, help="seconds that the reward of a sample takes")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args(argv)
    if min(arguments.rounds, arguments.samples) < 1 or arguments.steps < WARM_UP + 1 or arguments.reward_seconds < 0:
        parser.error(
            f"at least --rounds 1, --samples 1 and --steps {WARM_UP + 1}, --reward-seconds of 0 or more are needed"
        )
    return arguments


def _facts(arguments: argparse.Namespace) -> dict[str, Any]:
    reward = f"of {arguments.reward_seconds} s" if arguments.reward == "service" else "that runs a program"
    return {
        "a device": "a process with one thread",
        "step": f"{arguments.samples} samples of {PROMPT_TOKENS} + {RESPONSE_TOKENS} tokens, a reward {reward}",
        "rounds": arguments.rounds,
        "steps that count": arguments.steps - WARM_UP,
    }


def watched(run: Path, changes: Sequence[str], **how: Any) -> list[Row]:
    """`train`, with processor seconds of the step in each row: `busy` [device] of each device's process, `run_s` of all."""
    readings: dict[int, list[float]] = {}  # rows -> all, then each device
    ended = threading.Event()

    def watch() -> None:
        processes: list[psutil.Process] = []
        while not ended.wait(0.02):
            try:
                num_rows = (run / "metrics.jsonl").read_bytes().count(b"\n")
            except OSError:
                continue
            processes = processes or devices()
            if num_rows not in readings:
                with contextlib.suppress(psutil.Error):
                    family = psutil.Process().children(recursive=True)
                    readings[num_rows] = [sum(map(processor_s, family)), *map(processor_s, processes)]

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        rows = train(run, changes, **how)
    finally:
        ended.set()
        thread.join(timeout=5)
    for row in rows:
        before, after = readings.get(row["step"] - 1), readings.get(row["step"])
        if before and after:
            row["run_s"], *row["busy"] = [b - a for a, b in zip(before, after, strict=True)]
    return rows


def processor_s(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:2]))


def devices() -> list[psutil.Process]:
    """The device processes of the run below this process, by rank; the run's own process where it has one device."""
    below = psutil.Process().children(recursive=True)
    ranks = [process for process in below if "RankProcess" in " ".join(process.cmdline())]
    if ranks:
        return sorted(ranks, key=lambda p: next((f.path for f in p.open_files() if "rank_" in f.path), ""))
    return [max(below, key=processor_s)]


def fill(report: Report, metrics: Mapping[str, Sequence[Sequence[Row]]], num_samples: int = PROMPTS) -> None:
    """The table and results."""
    steps = {name: Series(tuple(s for rows in runs for s in step_seconds(rows))) for name, runs in metrics.items()}
    allowed = bounds(metrics)
    lines = []
    for name, series in steps.items():
        gained, used = ratio(steps[SERIAL], series), utilisation(metrics[name])
        samples, waited = num_samples / series.median, generation_s(metrics[name])
        share, shown = gained / allowed[name], f"{number(waited)} s, {waited / series.median:.0%}"
        cells = [f"{samples:.2f}", shown, f"{gained:.2f}", f"{allowed[name]:.2f}", f"{share:.0%}"]
        cores, beside = cores_used(metrics[name]), processor_seconds(metrics[name])[1]
        busy = " ".join(f"{part:.0%}" for part in used)
        lines.append([name, series.text("s"), *cells, busy, f"{number(beside)} s", f"{cores:.0%}"])
        report.results[name] = {
            "step_s": series.to_json(), "samples_per_s": samples, "generation_s": waited, "times_faster": gained,
            "bound": allowed[name], "share_of_bound": share, "busy": used, "beside_s": beside, "cores": cores,
        }  # fmt: skip
    columns = ["step", "samples/s", "generation", "times serial", "bound", "share", "busy", "outside", "cores"]
    report.add_table(["", *columns], lines)


def bounds(metrics: Mapping[str, Sequence[Sequence[Row]]]) -> dict[str, float]:
    """Largest speed-up of each side, by the serial run's median times, and by the work of the cores."""
    serial = metrics[SERIAL]
    counted = [row for rows in serial for row in rows if row["step"] > WARM_UP]
    t = {span: statistics.median(row.get(f"timing_s/{span}", 0.0) for row in counted) for span in _SPANS}
    step = statistics.median(s for rows in serial for s in step_seconds(rows))
    updates = min(t["update_actor"], t["update_critic"])  # at the same time on two devices
    generation = t["gen"] + t["reward"]
    beside_samples = min(t["gen"], t["ref"] + t["values"])  # of the next step, where the others look at this one's
    best = {
        SERIAL: step,
        "ahead": max(step - t["reward"], generation),  # the samples of a step are made and scored within one step
        "groups": step - updates,
        "groups, ahead": max(step - updates - t["reward"] - beside_samples, generation),
        APART: step,
        f"{APART}, ahead": max(step - generation, generation),
        f"{APART}, ahead, gathered": max(step - generation, generation),
    }
    work, cores = processor_seconds(serial)[0], os.cpu_count() or 1
    least = {name: (work + processor_seconds(runs)[1]) / cores for name, runs in metrics.items()}
    return {name: step / max(best[name], least[name], 1e-9) for name in metrics}


def processor_seconds(runs: Sequence[Sequence[Row]]) -> tuple[float, float]:
    """Median processor seconds of a step: of the devices' processes, and of all others of the run."""
    counted = [row for rows in runs for row in rows if row["step"] > WARM_UP and row.get("busy")]
    if not counted:
        return 0.0, 0.0
    devices, all_ = ([sum(row["busy"]) for row in counted], [row["run_s"] for row in counted])
    return statistics.median(devices), statistics.median(b - a for a, b in zip(devices, all_, strict=True))


def utilisation(runs: Sequence[Sequence[Row]]) -> list[float]:
    """Share of the counted steps in which the process of each device works."""
    counted = [row for rows in runs for row in rows if row["step"] > WARM_UP and row.get("busy")]
    total = sum(row["perf/time_per_step"] for row in counted)
    return [min(1.0, sum(device) / total) for device in zip(*(row["busy"] for row in counted), strict=True)]


def cores_used(runs: Sequence[Sequence[Row]]) -> float:
    """Processor time of all processes of the run, as a share of the machine's."""
    counted = [row for rows in runs for row in rows if row["step"] > WARM_UP and row.get("run_s")]
    total = sum(row["perf/time_per_step"] for row in counted) * (os.cpu_count() or 1)
    return sum(row["run_s"] for row in counted) / total if total else 0.0


def generation_s(runs: Sequence[Sequence[Row]]) -> float:
    """Median seconds in which a step waits for samples."""
    counted = [row for rows in runs for row in rows if row["step"] > WARM_UP]
    return statistics.median(
        sum(row.get(f"timing_s/{span}", 0.0) for span in ("gen", "rollout_wait")) for row in counted
    )


if __name__ == "__main__":
    raise SystemExit(main())
