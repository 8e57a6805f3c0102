"""Thousands of steps of a tiny run: growth of the memory of its processes, and the cost of a step outside its model.

    python benchmarks/soak.py                          # 2,000 steps of a model of 60,000 parameters
    python benchmarks/soak.py --steps 300 --set trainer.save_freq=50
    python benchmarks/soak.py --ranks 2                # under torchrun

A whole run of `verl train` (GRPO, 2 prompts x 4 samples x 8 tokens, a checkpoint every 500 steps) is started, and the resident
memory of each of its processes is read twice a second. After the warm-up (the first quarter of the steps) a line is fitted to
the means of 20 stretches of the run: its slope in MB (10^6 bytes) per 1,000 steps, and twice its standard error. The same for
the number of open files. Then the time of a step, by span. Exit code 1: a slope that is above --limit by more than its error,
or a process that remains after the end.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent))

from report import Report
from runs import REWARD, Row, write_prompts

PROMPTS, SAMPLES, RESPONSE_TOKENS = 2, 4, 8
WARM_UP = 0.25  # of the steps
NUM_STRETCHES = 20
SHARES = (WARM_UP, 0.5, 0.75, 1.0)  # of the steps, after which the memory is shown
EVERY_S = 0.5
_END_LIMIT_S = 20.0


@dataclass
class Watched:
    """A process of the run and its readings: (seconds since 1970, resident bytes, open files)."""

    name: str
    process: psutil.Process
    readings: list[tuple[float, int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Slope:
    """Of a line through points whose x are thousands of steps; `error` is twice its standard error."""

    per_thousand: float
    error: float

    @property
    def surely_above(self) -> float:
        """Lower bound of the slope."""
        return self.per_thousand - self.error


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    with tempfile.TemporaryDirectory(prefix="verl-soak-") as scratch:
        folder = Path(scratch)
        watched = run(arguments, folder)
        rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    left = survivors([w.process for w in watched])
    report = Report("Soak", facts={"steps": arguments.steps, "ranks": arguments.ranks, "further keys": arguments.set})
    slopes = {w.name: slope_of(w.readings, rows, of=1, scale=1e-6) for w in watched}
    files = {w.name: slope_of(w.readings, rows, of=2) for w in watched}
    report.add_table(
        ["process", *(f"MB at {share:.0%}" for share in SHARES), "MB per 1,000 steps", "open files per 1,000 steps"],
        [_line(w, rows, slopes[w.name], files[w.name]) for w in watched],
    )
    report.add_table(["of a step", "ms (median)", "share"], time_of_steps(rows))
    growing = [name for name, slope in slopes.items() if slope is not None and slope.surely_above > arguments.limit]
    report.notes += [f"grows: {name}" for name in growing] + [f"left after the end: {name}" for name in left]
    report.results = {
        "slopes": {n: s and vars(s) for n, s in slopes.items()},
        "open_files": {n: s and vars(s) for n, s in files.items()},
        "growing": growing,
        "left": left,
        "step_s": median(step_seconds(rows)),
    }
    report.finish(arguments.json)
    return 1 if growing or left else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=1, help="processes that train, started by torchrun if several")
    parser.add_argument("--limit", type=float, default=1.0, help="largest slope in MB per 1,000 steps")
    parser.add_argument("--timeout-s", type=float, default=3600.0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a further key")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args(argv)
    if arguments.steps < NUM_STRETCHES * 4:
        parser.error(f"at least --steps {NUM_STRETCHES * 4} are needed")
    return arguments


def overrides(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """The keys of the run; writes the files that they name into `folder`."""
    from verl.models.tiny import make_tiny_model

    model = make_tiny_model(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    write_prompts(folder / "train.jsonl", [f"Say something about {i}." for i in range(512)])
    return [
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={folder}/train.jsonl",
        "data.val_files=[]",
        f"data.train_batch_size={PROMPTS}",
        "data.max_prompt_length=64",
        f"data.max_response_length={RESPONSE_TOKENS}",
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        "actor_rollout_ref.rollout.ignore_eos=True",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={folder}/reward.py",
        "reward.custom_reward_function.reward_kwargs.seconds=0",
        "trainer.logger=[file]",
        "trainer.save_freq=500",
        "trainer.max_actor_ckpt_to_keep=2",
        f"trainer.total_training_steps={arguments.steps}",
        f"trainer.default_local_dir={folder / 'run'}",
        *([f"trainer.n_gpus_per_node={arguments.ranks}"] if arguments.ranks > 1 else []),
        *arguments.set,
    ]


def run(arguments: argparse.Namespace, folder: Path) -> list[Watched]:
    """Train to the end; every process that was there for two readings."""
    launcher = []
    if arguments.ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={arguments.ranks}"]
    command = [sys.executable, *launcher, "-m", "verl", "train", *overrides(arguments, folder)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    watched: dict[int, Watched] = {}
    until = time.monotonic() + arguments.timeout_s
    log = folder / "output.log"
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output, env=environment) as process:
        try:
            while process.poll() is None:
                if time.monotonic() > until:
                    raise SystemExit(f"The run took longer than --timeout-s {arguments.timeout_s:g}.")
                read_all(psutil.Process(process.pid), watched)
                time.sleep(EVERY_S)
        finally:
            process.terminate()
    if process.returncode:
        raise SystemExit(f"The run ended with exit code {process.returncode}:\n{log.read_text()[-3000:]}")
    return [w for w in watched.values() if len(w.readings) > 1]


def read_all(root: psutil.Process, watched: dict[int, Watched]) -> None:
    """One reading of `root` and all that descend from it."""
    try:
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in family:
        try:
            if process.pid not in watched:
                watched[process.pid] = Watched(name_of(process.cmdline(), process.pid == root.pid, watched), process)
            memory, files = process.memory_info().rss, process.num_fds()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        watched[process.pid].readings.append((time.time(), memory, files))


def name_of(command: Sequence[str], is_root: bool, known: Mapping[int, Watched]) -> str:
    """Name of a process by the purpose that its command line shows; numbered from the second of a kind on."""
    text = " ".join(command)
    kinds = (("verl.rewards", "reward worker"), ("torch.distributed.run", "launcher"), ("verl train", "training"))
    kind = "first process" if is_root else next((name for mark, name in kinds if mark in text), "other")
    same = sum(1 for w in known.values() if w.name.split(" #")[0] == kind)
    return kind if not same else f"{kind} #{same + 1}"


def survivors(processes: Sequence[psutil.Process], limit_s: float = _END_LIMIT_S) -> list[str]:
    """Processes of the run that are still there."""
    _, alive = psutil.wait_procs(processes, timeout=limit_s)
    return [f"pid {p.pid}" for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def steps_at(times: Sequence[float], rows: Sequence[Row]) -> list[float]:
    """Number of steps taken at each of `times`; NaN before the first and after the last row."""
    ends = [(row["time"], row["step"]) for row in rows]
    steps, i = [], 0
    for now in times:
        while i + 1 < len(ends) and ends[i + 1][0] <= now:
            i += 1
        inside = i + 1 < len(ends) and ends[i][0] <= now
        if not inside:
            steps.append(math.nan)
            continue
        (before, step), (after, following) = ends[i], ends[i + 1]
        steps.append(step + (now - before) / max(after - before, 1e-9) * (following - step))
    return steps


def points_of(readings: Sequence[tuple[float, int, int]], rows: Sequence[Row], of: int) -> list[tuple[float, float]]:
    """(steps taken, reading) after the warm-up."""
    last = rows[-1]["step"]
    steps = steps_at([reading[0] for reading in readings], rows)
    return [(step, float(r[of])) for step, r in zip(steps, readings, strict=True) if step >= WARM_UP * last]


def slope_of(
    readings: Sequence[tuple[float, int, int]], rows: Sequence[Row], *, of: int, scale: float = 1.0
) -> Slope | None:
    """The slope of reading number `of`, times `scale`; None for a process that was not there for most of the run."""
    points = points_of(readings, rows, of)
    last = rows[-1]["step"]
    if not points or points[-1][0] - points[0][0] < 0.5 * (1 - WARM_UP) * last:
        return None
    return fitted([(step / 1000, value * scale) for step, value in stretches(points)])


def stretches(points: Sequence[tuple[float, float]], count: int = NUM_STRETCHES) -> list[tuple[float, float]]:
    """Means of `count` neighbouring stretches: single readings depend on those before them."""
    size = max(1, len(points) // count)
    parts = [points[i : i + size] for i in range(0, len(points) - size + 1, size)]
    return [(fmean(x for x, _ in part), fmean(y for _, y in part)) for part in parts]


def fitted(points: Sequence[tuple[float, float]]) -> Slope | None:
    """Least squares; None for fewer than three points."""
    if len(points) < 3:
        return None
    mean_x, mean_y = fmean(x for x, _ in points), fmean(y for _, y in points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    return Slope(slope, 2 * math.sqrt(rest / (len(points) - 2) / spread))


def step_seconds(rows: Sequence[Row]) -> list[float]:
    """Between the rows of two steps that follow one another, after the warm-up."""
    times = [row["time"] for row in rows if row["step"] >= WARM_UP * rows[-1]["step"]]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def time_of_steps(rows: Sequence[Row]) -> list[list[str]]:
    """Median milliseconds of each span, and of what no span covers."""
    after = [row for row in rows if row["step"] >= WARM_UP * rows[-1]["step"]]
    whole = median(step_seconds(rows))
    names = sorted({n for row in after for n in row if n.startswith("timing_s/") and n != "timing_s/step"})
    spans = {n.removeprefix("timing_s/"): median(row.get(n) or 0.0 for row in after) for n in names}
    spans["between the spans"] = max(0.0, median(row["timing_s/step"] for row in after) - sum(spans.values()))
    spans["records, after the step"] = max(0.0, whole - median(row["timing_s/step"] for row in after))
    lines = sorted(spans.items(), key=lambda item: -item[1])
    return [[name, f"{1000 * s:.1f}", f"{s / whole:.0%}"] for name, s in [("whole step", whole), *lines] if s > 0]


def _line(watched: Watched, rows: Sequence[Row], slope: Slope | None, files: Slope | None) -> list[str]:
    points = points_of(watched.readings, rows, 1)
    shown = []
    for share in SHARES:
        nearest = min(points, key=lambda point: abs(point[0] - share * rows[-1]["step"]), default=None)
        shown.append(f"{nearest[1] / 1e6:.1f}" if nearest is not None else "-")
    slopes = [f"{s.per_thousand:+.2f} ± {s.error:.2f}" if s else "-" for s in (slope, files)]
    return [watched.name, *shown, *slopes]


if __name__ == "__main__":
    raise SystemExit(main())
