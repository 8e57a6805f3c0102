"""One run of `verl train` under attack: its command, its processes, and the moments at which they are killed."""

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import psutil
from chaos_task import RUNTIMES, Moment, Task, plan

from verl.parallel.child_processes import die_with
from verl.tracking.heartbeat import Beat, read_beat

_MARK = "VERL_CHAOS_RUN"  # in the environment of every process of a run
_GONE_S = 10.0  # for the last processes of an ended run to exit, and for a killed process
_LOOK_S = 0.0003  # between two looks at the heartbeat, while a phase of a millisecond is waited for
LIMIT_S = 240.0  # for a run to come back, and to reach the next moment
ROOT = Path(__file__).resolve().parents[2]
T = TypeVar("T")


class Lost(Exception):
    """The run did not come back, or ended by itself; the message ends with the end of its output."""


@dataclass(frozen=True)
class Kill:
    """A SIGKILL that a living process got. `target` is what kind of process that was, `phase` where the run was: "after gen"
    when gen had begun twice as long ago as it usually lasts, "start" before the first step. `back_by`: who brought the run
    back (itself, supervisor, launcher, hand), `steps_again`: steps that were taken once more. `recovered_s` and `steps_again`
    are None when the run was killed again before it was back."""

    runtime: str
    run: str
    target: str
    pid: int
    step: int
    phase: str
    back_by: str
    recovered_s: float | None
    steps_again: int | None
    early: bool = False  # before the run had its first checkpoint


class Hit(NamedTuple):
    target: str
    pid: int
    beat: Beat
    phase: str
    early: bool
    fatal: bool  # the first process of the command: its descendants die with it, some moments later


class Family:
    """The processes of a run by kind: supervisor or launcher, driver (rank 0 under torchrun), rank, engine, reward worker (the
    scorer and the processes around it), tool process, runner (a program behind the endpoint), node (of Ray), other."""

    def __init__(self, root: psutil.Process, runtime: str):
        self._root, self._runtime = root, runtime
        self._command = _command(root)
        self.kinds: dict[str, list[psutil.Process]] = defaultdict(list)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    self.kinds[self._kind(process)].append(process)

    def choose(self, target: str, rng: random.Random) -> tuple[str, psutil.Process] | None:
        """(kind, process); None when there is none of that kind. "any" is any process below the first."""
        kinds = [k for k in self.kinds if k not in ("supervisor", "launcher")] if target == "any" else [target]
        candidates = [(kind, process) for kind in kinds for process in self.kinds.get(kind, ())]
        return rng.choice(candidates) if candidates else None

    def _kind(self, process: psutil.Process) -> str:
        launched = bool(RUNTIMES[self._runtime].launcher)
        if process.pid == self._root.pid:
            return "launcher" if launched else "supervisor"
        command = _command(process)
        if process.ppid() == self._root.pid:
            if launched:
                return "driver" if process.environ().get("RANK") == "0" else "rank"
            if command == self._command:  # a fork
                return "driver"
        if "RankProcess" in command:
            generates = self._runtime == "ray-apart" and "rank_1.log" in open_files(process)
            return "engine" if generates else "rank"
        marks = {
            "chaos_runner.py": "runner",
            "verl.rewards.": "tool process" if self._runtime.startswith("agents") else "reward worker",
            "verl.rollout.process_main": "engine",
            "raylet/raylet": "node",
            "gcs_server": "node",
        }
        return next((kind for mark, kind in marks.items() if mark in command), "other")


class Victim:
    """`verl train` in a separate run folder, started as often as needed. `usual_s`: the result of `usual` for an undisturbed
    run."""

    def __init__(self, task: Task, runtime: str, name: str, usual_s: dict[str, float] | None = None):
        self.task, self.runtime = task, runtime
        self.folder = task.folder / runtime / name
        self.usual_s = usual_s or {}
        self.started_s = 0.0  # from the command to the first step
        self._log = self.folder.parent / f"{name}.log"
        self._num_by_hand = 0
        self._struck_step = 0  # a second such end in the same step would be the last: the supervisor gives up
        self.folder.mkdir(parents=True)
        self._start()

    def keys(self) -> list[str]:
        """Arguments of `verl train`."""
        runtime, changes = RUNTIMES[self.runtime].keys, self.task.changes
        return [*self.task.keys, *runtime, *changes, f"trainer.default_local_dir={self.folder}"]

    def launch(self, log: Path) -> Any:
        """The first process of the command, with `pid` and `poll`; its output is appended to `log`."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
        environment[_MARK] = str(self.folder)
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with log.open("ab") as file:
            return subprocess.Popen(
                [sys.executable, *RUNTIMES[self.runtime].launcher, "-m", self.task.program.module, *self.keys()],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True,
                preexec_fn=partial(die_with, os.getpid()),
            )  # fmt: skip

    def _start(self) -> None:
        self._began, self._first_was_killed = time.monotonic(), False
        self.process = self.launch(self._log)

    def beat(self) -> Beat | None:
        """The current heartbeat of the run; None after its end and while its process is not alive."""
        beat = read_beat(self.folder)
        return beat if beat is not None and beat.phase != "ended" and psutil.pid_exists(beat.pid) else None

    def has_begun(self, step: int) -> bool:
        return (beat := self.beat()) is not None and beat.step >= step

    def family(self) -> Family | None:
        """The living processes; None when there are none."""
        if self.process.poll() is not None:
            return None
        return _safe(lambda: Family(psutil.Process(self.process.pid), self.runtime), None)

    def usual(self) -> dict[str, float]:
        """Seconds that each phase lasted in the second half of the steps, and `start`: what came before the first."""
        durations: dict[str, list[float]] = defaultdict(list)
        for line in (self.folder / "spans.jsonl").read_text().splitlines():
            row = json.loads(line)
            if row["step"] > self.task.steps // 2:
                durations[row["name"]].append(row["seconds"])
        return {"start": self.started_s, **{name: median(seconds) for name, seconds in durations.items()}}

    def strikes(self, rng: random.Random, count: int, options: argparse.Namespace) -> Iterator[list[Kill]]:
        """The kills of this run, `count` in all, until it has ended."""
        targets, phases, early = options.targets, options.phases, options.before_first_checkpoint
        for moment in plan(rng, self.runtime, count, targets, self.task.program, phases, early):
            if not (hits := self.strike(moment, rng)):
                return
            yield hits

    def strike(self, moment: Moment, rng: random.Random) -> list[Kill]:
        """Wait for the moment, kill, and wait until the run is where it was; nothing when it has ended well before that. Raises
        Lost when it does not come back."""
        first = self._hit_at(moment, rng)
        if first is None:
            return []
        self._struck_step = first.beat.step
        struck, kills, by_hand, last = time.monotonic(), [], self._num_by_hand, first
        if moment.again is not None and (second := self._hit_again(first, moment, rng)) is not None:
            kills, struck, last = [self._kill(first, "killed again", None, None)], time.monotonic(), second
        return [*kills, self._come_back(first, struck, by_hand, last)]

    def _kill(self, hit: Hit, by: str, recovered_s: float | None, again: int | None) -> Kill:
        place = (self.runtime, self.folder.name, hit.target, hit.pid, hit.beat.step, hit.phase)
        return Kill(*place, by, recovered_s, again, hit.early)

    def _hit_at(self, moment: Moment, rng: random.Random) -> Hit | None:
        until, step = time.monotonic() + LIMIT_S, max(moment.step, self._struck_step + 1)
        while self.until(partial(self.has_begun, step), f"step {step} was not reached", until):
            family = self.family()
            chosen = None if family is None else family.choose(moment.target, rng) or family.choose("any", rng)
            if chosen is not None and self._wait_for_phase(moment):
                time.sleep(moment.delay_s(self.usual_s))
                chosen = (moment.target == "runner" and self._runner(rng)) or chosen
                if (hit := self._hit(*chosen)) is not None:
                    return hit
        return None

    def _runner(self, rng: random.Random) -> tuple[str, psutil.Process] | None:
        """A program behind the endpoint that runs now: one lives for an episode, so that none of them was there before."""
        for _ in range(300):  # looks of some milliseconds
            if (family := self.family()) is not None and (runner := family.choose("runner", rng)) is not None:
                return runner
        return None

    def _hit_again(self, first: Hit, moment: Moment, rng: random.Random) -> Hit | None:
        """Kill once more while the run comes back; None when it had not ended at all, or is back already."""
        until = time.monotonic() + LIMIT_S
        self.until(lambda: self._is_starting(first) or self._is_past(first), "nothing was started again", until, 0.0)
        then = time.monotonic() + moment.again * self.usual_s.get("start", 0.0)
        while self.process.poll() is None and not self._is_past(first):
            if time.monotonic() > then and (family := self.family()) is not None:
                chosen = family.choose(moment.target_again, rng) or family.choose("any", rng)
                if chosen is not None and (hit := self._hit(*chosen)) is not None:
                    return hit
            self._check(until, "nothing could be killed")
            time.sleep(0.002)
        return None

    def _is_past(self, first: Hit) -> bool:
        """Whether the run, or another in its place, has come beyond the step of the kill or back to it."""
        beat = self.beat()
        if beat is None or (first.fatal and beat.pid == first.beat.pid):
            return False
        return beat.step > first.beat.step - (beat.pid != first.beat.pid)

    def _is_starting(self, first: Hit) -> bool:
        """Whether a process runs in the place of the one whose beat was seen last."""
        family = self.family()
        return family is not None and any(p.pid != first.beat.pid for p in family.kinds["driver"])

    def _hit(self, kind: str, process: psutil.Process) -> Hit | None:
        """SIGKILL; None when the process has ended by itself."""
        before, early = self.beat(), not any(self.folder.glob("global_step_*"))
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return None
            process.kill()
        except psutil.NoSuchProcess:
            return None
        beat, now, fatal = read_beat(self.folder), time.time(), process.pid == self.process.pid
        self._first_was_killed |= fatal
        until = time.monotonic() + _GONE_S
        while lives(process):
            self._check(until, f"process {process.pid} survived SIGKILL")
            time.sleep(0.001)
        beat = beat or Beat(0, "", 0, "", 0.0)
        return Hit(kind, process.pid, beat, self._phase(beat, now) if before else "start", early, fatal)

    def _phase(self, beat: Beat, now: float) -> str:
        if beat.step == 0:
            return "start"
        late = now - beat.since > 2 * self.usual_s.get(beat.phase, float("inf"))
        return f"after {beat.phase}" if late else beat.phase

    def until(
        self, condition: Callable[[], object], what: str, limit: float | None = None, look_s: float = 0.001
    ) -> bool:
        """Wait for `condition`; False when the run has ended well before. The command is run again when its first process was
        killed. Raises Lost with the words `what` at the time `limit`, and when the command ended with its own error."""
        limit = limit or time.monotonic() + LIMIT_S
        while self.process.poll() != 0:
            self._go_on()
            if condition():
                return True
            self._check(limit, what)
            time.sleep(look_s)
        return False

    def _wait_for_phase(self, moment: Moment) -> bool:
        """Until the run has just come into the phase; False when it ended or was started again meanwhile."""
        last, until = None, time.monotonic() + LIMIT_S
        while self.process.poll() is None:
            beat = self.beat()
            if beat is None or (last is not None and beat.pid != last.pid):
                return False
            if moment.phase not in self.usual_s:  # "any", or a phase that this runtime lacks
                return True
            if last is not None and beat != last and beat.phase == moment.phase:
                return True
            last = beat
            self._check(until, f"phase {moment.phase} was not reached")
            time.sleep(_LOOK_S)
        return False

    def _come_back(self, hit: Hit, struck: float, by_hand: int, last: Hit | None = None) -> Kill:
        """Wait until the run has reached its step of `hit` again. The kill `last` (None: `hit`) came at `struck`, when the
        command had been run again `by_hand` times. A run that was not restarted must take two more steps, since it may notice
        a loss late."""
        before, at, reached = hit.beat, 0.0, max(hit.beat.step, 1)
        resumed: int | None = (
            None  # the first step that others took after the processes of before; None: they continued
        )

        def is_back() -> bool:
            nonlocal at, reached, resumed
            beat = self.beat()
            if beat is not None and beat.pid != before.pid:
                resumed = beat.step if resumed is None and beat.step else resumed
                at = time.monotonic() if beat.step >= reached else at
                return beat.step >= reached
            if beat is not None and beat.step > before.step:
                reached, at = beat.step, at or time.monotonic()
                return beat.step > before.step + 2 and not hit.fatal
            return False

        self.until(is_back, "it did not come back", look_s=0.002)
        restarter = "launcher" if RUNTIMES[self.runtime].launcher else "supervisor"
        by = "hand" if self._num_by_hand > by_hand else "itself" if resumed is None else restarter
        again = 0 if resumed is None else max(reached - resumed + 1, 0)
        return self._kill(last or hit, by, (at or time.monotonic()) - struck, again)

    def _go_on(self) -> None:
        """Run the command again if its first process was killed. Raises Lost when it ended with its own error."""
        code = self.process.poll()
        if code in (None, 0):
            return
        if not self._first_was_killed:
            raise Lost(f"the command ended by itself with {code}: {self.last_words()}")
        self._num_by_hand += 1
        self._start()

    def to_the_end(self) -> None:
        """Wait for a good end of the run."""

        def note_start() -> None:
            if not self.started_s and self.has_begun(1):
                self.started_s = time.monotonic() - self._began

        self.until(note_start, "it did not end", look_s=0.02)

    def _check(self, until: float, what: str) -> None:
        if time.monotonic() > until:
            raise Lost(f"{what} within the time: {self.last_words()}")

    def last_words(self) -> str:
        return " | ".join(self._log.read_text(errors="replace").splitlines()[-8:])

    def end(self) -> None:
        """End the remaining processes of the run."""
        for process in self.left_over():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def left_over(self) -> list[psutil.Process]:
        """Processes that were started by a process of the run."""
        mark = str(self.folder)
        return [p for p in psutil.process_iter() if lives(p) and _safe(p.environ, {}).get(_MARK) == mark]

    def left_in_the_end(self) -> list[str]:
        """Commands of the processes that remain some seconds after the end."""
        until = time.monotonic() + _GONE_S
        while (survivors := self.left_over()) and time.monotonic() < until:
            time.sleep(0.1)
        return [_command(process)[:200] for process in survivors]


def _safe(read: Callable[[], T], default: T) -> T:
    """The result of `read`, or `default` for a process that is gone or belongs to another user."""
    try:
        return read()
    except psutil.Error:
        return default


def lives(process: psutil.Process) -> bool:
    return _safe(lambda: process.is_running() and process.status() != psutil.STATUS_ZOMBIE, False)


def _command(process: psutil.Process) -> str:
    return " ".join(_safe(process.cmdline, []))


def open_files(process: psutil.Process) -> list[str]:
    """Names of the files that a process has open."""
    return [Path(file.path).name for file in _safe(process.open_files, [])]
