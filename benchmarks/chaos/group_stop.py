"""SIGTERM for the whole process group of a run, as `timeout`, SLURM and terminals send it: whether it saves and ends in time.

    python benchmarks/chaos/group_stop.py                     10 runs each on local, torchrun and ray
    python benchmarks/chaos/group_stop.py ray --times 3
    python benchmarks/chaos/group_stop.py --each              to each of its processes instead, as systemd sends it

The signal comes at a random moment of a step. A run has stopped well when it has saved after the last step that it wrote down,
has ended within 30 s, and has left no process behind.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.extend(map(str, Path(__file__).resolve().parents[1:3]))

import psutil
from chaos_run import LIMIT_S, Victim
from chaos_task import Task, make_task

from verl.checkpoint.store import CheckpointStore
from verl.tracking.files import read_json_rows

KINDS = ("local", "torchrun", "ray")
IN_TIME_S = 30.0
_STEP_S = 0.5  # a step of the task, about


@dataclass(frozen=True)
class Stop:
    """The end of one run: seconds since the signal, the step of its newest checkpoint and of its last row of metrics, the exit
    code of the command, and the processes that were left."""

    seconds: float
    saved: int
    taken: int
    code: int | None
    left: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        return 0 < self.saved == self.taken and self.seconds <= IN_TIME_S and not self.left


def endless_task(folder: Path) -> Task:
    """A task that saves only when it is stopped."""
    task = make_task(folder, steps=100_000)
    return replace(task, keys=tuple(key for key in task.keys if not key.startswith("trainer.save_freq=")))


def stop(task: Task, kind: str, name: str, rng: random.Random, *, each: bool = False) -> Stop:
    """Start a run of `kind`, send the signal after its first step, and wait for its end. `each`: to all processes of the run,
    whatever their group, in a random order."""
    run = Victim(task, kind, name)
    try:
        until = time.monotonic() + LIMIT_S
        while (beat := run.beat()) is None or beat.step < 2:
            if run.process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"The {kind} run took no step: {run.last_words()}")
            time.sleep(0.01)
        time.sleep(rng.random() * _STEP_S)
        sent = time.monotonic()
        if each:
            terminate_each(run, rng)
        else:
            os.killpg(run.process.pid, signal.SIGTERM)
        while run.process.poll() is None and time.monotonic() < sent + LIMIT_S:
            time.sleep(0.01)
        seconds, left = time.monotonic() - sent, tuple(run.left_in_the_end())
    finally:
        run.end()
    newest = CheckpointStore(run.folder).find()
    saved = 0 if newest is None else int(newest.name.rpartition("_")[2])
    taken = max((row["step"] for row in read_json_rows(run.folder / "metrics.jsonl")), default=0)
    return Stop(seconds, saved, taken, run.process.poll(), left)


def terminate_each(run: Victim, rng: random.Random) -> None:
    """SIGTERM for every process of the run; Ray's agents overwrite the environment by which others are found."""
    first = psutil.Process(run.process.pid)
    processes = list({first, *first.children(recursive=True), *run.left_over()})
    rng.shuffle(processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; default: all")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--each", action="store_true", help="signal every process, not the group")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if unknown := sorted(set(options.kinds) - set(KINDS)):
        parser.error(f"there is no kind {unknown[0]!r}; there are {', '.join(KINDS)}")
    rng, num_bad = random.Random(options.seed), 0
    with tempfile.TemporaryDirectory() as folder:
        task = endless_task(Path(folder))
        for kind in options.kinds or KINDS:
            stops = []
            for number in range(options.times):
                stops.append(stop(task, kind, str(number), rng, each=options.each))
                print(f"  {kind} {number}: {stops[-1]}", flush=True)
            good, slowest = sum(one.is_good for one in stops), max(one.seconds for one in stops)
            num_bad += len(stops) - good
            print(
                f"{kind}: {good} of {len(stops)} saved and ended within {IN_TIME_S:.0f} s, the slowest in {slowest:.1f} s"
            )
    return min(num_bad, 1)


if __name__ == "__main__":
    sys.exit(main())
