"""The supervisor of `verl train`: the run is a child of this process, is watched, and is started again after a crash.

This process forks before torch is imported, so it is small, and the run that its child does starts no later for it: the child
has its terminal, its input and its config. What the child ends with is what this process ends with, unless that was a crash:
then the run goes on from its last checkpoint in a new child, as often as `trainer.max_restarts` allows without a new
checkpoint in between. Ending twice in the same way in the same step is not waited for any longer.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.config import TrainerConfig
from verl.errors import DeadlineError, WorkerLostError
from verl.parallel.child_processes import adopt_orphans, die_with, end_descendants
from verl.parallel.stack_dump import dump_of, in_debugger, innermost
from verl.tracking.files import append_rows
from verl.tracking.heartbeat import EVENTS, Beat, read_beat, stacks_file

_WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
_TICK_S = 0.25
_LONGEST_TICK_S = 5.0  # more than that between two ticks is time in which this process was stopped, and the run with it
_DUMP_S = 3.0
_LONGEST_BACKOFF_S = 300.0
_BUG = 70  # exit code of the command line for an error that is not of ours
_NOTE_BYTES = 3000
_CAUSE_CHARS = 300
_CHECKPOINT = re.compile(r"global_step_(\d+)")


@dataclass(frozen=True)
class Ending:
    """How a child ended. `cause` completes "the run ended with"; a `final` one is no crash."""

    code: int
    cause: str
    final: bool
    beat: Beat | None  # the last of that child

    @property
    def place(self) -> str:
        if self.beat is None:
            return "while it started"
        return f"in step {self.beat.step} ({self.beat.phase})" if self.beat.step else f"in {self.beat.phase}"

    def repeats(self, other: Ending) -> bool:
        """The same cause at the same place; numbers in it (process ids, seconds, addresses) may differ."""
        return self.place == other.place and _without_numbers(self.cause) == _without_numbers(other.cause)


def supervise(work: Callable[[Path | None], int], folder: Path, rules: TrainerConfig) -> int:
    """Do `work` in a child of this process and return its exit code; `folder` is the run folder.

    `work` is called with None, and after a crash with the newest checkpoint that this run has saved, if there is one. In the
    child this function returns what `work` returns and raises what it raises. Where the system has no `sigtimedwait`, the work
    is done here, unwatched.
    """
    if not hasattr(signal, "sigtimedwait"):
        return work(None)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, as some parents leave it, it would hide how a child ended
    adopt_orphans()
    supervisor = Supervisor(folder, rules)
    here = os.getpid()
    while True:
        heard, said = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            os.close(heard)
            die_with(here)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return _noting(work, supervisor.saved, said)
        os.close(said)
        try:
            code = supervisor.decide(supervisor.watch(child, heard))
        finally:
            os.close(heard)
        if code is not None:
            while signal.sigtimedwait(_WATCHED, 0):  # what came meanwhile was meant for the run, which has ended
                pass
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return code


def _noting(work: Callable[[Path | None], int], saved: Path | None, said: int) -> int:
    """Do `work`, and tell the supervisor how it ended: an exit code alone does not say what the error was."""
    try:
        code = work(saved)
    except BaseException as error:
        _send(said, {"error": type(error).__name__, "text": str(error)})
        raise
    _send(said, {"error": "", "text": ""})
    return code


def _send(pipe: int, note: dict[str, str]) -> None:
    with contextlib.suppress(OSError):  # a supervisor that is gone needs no note
        os.write(pipe, json.dumps({k: v[: _NOTE_BYTES // 6] for k, v in note.items()}).encode())


class Supervisor:
    """Watches one child after the other, and decides after each whether there is another."""

    def __init__(self, folder: Path, rules: TrainerConfig):
        self.folder = folder
        self.rules = rules
        self.saved: Path | None = None  # the newest checkpoint that this run has saved
        self._began = time.time()
        self._num_restarts = 0  # since that checkpoint
        self._last: Ending | None = None
        self._asked_to_stop = 0  # the signal

    # -- while a child runs -------------------------------------------------------------------------------------------

    def watch(self, child: int, heard: int) -> Ending:
        """Wait for the child's end. Signals for the end of the run are passed on to it; when it hangs it is killed."""
        pulse = Pulse(self.folder, child, self.rules.hang_timeout_s)
        hang = ""
        while (status := _reap(child)) is None:
            found = signal.sigtimedwait(_WATCHED, _TICK_S)
            if found is not None and found.si_signo != signal.SIGCHLD:
                self._pass_on(found, child)
            if not hang and (hang := pulse.hang()):
                os.kill(child, signal.SIGKILL)
        beat = read_beat(self.folder)
        mine = beat if beat is not None and beat.pid == child else None
        if hang:
            return Ending(DeadlineError.exit_code, hang, False, mine)
        return _ending(os.waitstatus_to_exitcode(status), _note(heard), mine)

    def _pass_on(self, found: Any, child: int) -> None:
        self._asked_to_stop = found.si_signo
        if found.si_code <= 0:  # sent by a process to this one; what the terminal sends, the child has got as well
            os.kill(child, found.si_signo)

    # -- between two children -----------------------------------------------------------------------------------------

    def decide(self, ending: Ending) -> int | None:
        """The exit code, or None when the run is to be started again; the wait before that is over then."""
        if ending.final or self._asked_to_stop:
            return ending.code
        end_descendants()
        saved = newest_saved(self.folder, self._began)
        if saved != self.saved:
            self.saved, self._num_restarts = saved, 0
        self._num_restarts += 1
        repeated = self._last is not None and ending.repeats(self._last)
        self._last = ending
        if repeated or self._num_restarts > self.rules.max_restarts:
            return self._give_up(ending, repeated)
        wait_s = min(self.rules.restart_backoff_s * 2 ** (self._num_restarts - 1), _LONGEST_BACKOFF_S)
        where = f"from {self.saved.name}" if self.saved else "from where it began"
        again = f"restart {self._num_restarts} of {self.rules.max_restarts}"
        self._record("restarted", ending)
        _say(f"The run ended {ending.place} with {ending.cause}. It goes on {where} in {wait_s:g} s ({again}).")
        return self._pause(wait_s)

    def _give_up(self, ending: Ending, repeated: bool) -> int:
        self._record("gave up", ending)
        times = "twice in a row in the same way" if repeated else f"{self._num_restarts} times without a new checkpoint"
        _say(
            f"The run ended {times}, last {ending.place} with {ending.cause}. It is not started again: look at "
            f"{self.folder / 'logs'}{_advice(ending)}; then run the same command to go on."
        )
        return ending.code

    def _pause(self, wait_s: float) -> int | None:
        until = time.monotonic() + wait_s
        while (left_s := until - time.monotonic()) > 0:
            found = signal.sigtimedwait(_WATCHED, left_s)
            if found is not None and found.si_signo != signal.SIGCHLD:
                _say("interrupted.")
                return 128 + found.si_signo
        return None

    def _record(self, event: str, ending: Ending) -> None:
        row = {
            "time": round(time.time(), 3),
            "event": event,
            "step": ending.beat.step if ending.beat else None,
            "phase": ending.beat.phase if ending.beat else None,
            "cause": ending.cause,
            "code": ending.code,
            "from": self.saved.name if self.saved else None,
        }
        with contextlib.suppress(OSError):  # a folder that cannot be written must not keep the run from going on
            self.folder.mkdir(parents=True, exist_ok=True)
            append_rows(self.folder / EVENTS, [row])


class Pulse:
    """How long the heartbeat of `child` has been the same. Counting begins with its first; before that the waits of a start
    have deadlines of their own. 0: nothing is counted."""

    def __init__(self, folder: Path, child: int, limit_s: float):
        self._folder, self._child, self._limit_s = folder, child, limit_s
        self._beat: Beat | None = None
        self._still_s = 0.0
        self._ticked = time.monotonic()

    def hang(self) -> str:
        """In words what the child hangs in; "" while it does not."""
        now = time.monotonic()
        passed_s, self._ticked = min(now - self._ticked, _LONGEST_TICK_S), now
        if not self._limit_s:
            return ""
        beat = read_beat(self._folder)
        if beat is None or beat.pid != self._child or beat != self._beat:
            self._beat, self._still_s = beat, 0.0
            return ""
        self._still_s += passed_s
        return self._described(beat) if self._still_s > self._limit_s else ""

    def _described(self, beat: Beat) -> str:
        file = stacks_file(self._folder, 0)
        dump = "" if _is_held(self._child) else dump_of(self._child, file, _DUMP_S)
        if _is_held(self._child) or in_debugger(dump) or read_beat(self._folder) != beat:
            self._still_s = 0.0
            return ""
        stack = f"it was in {innermost(dump)}; all stacks are in {file}" if dump else "its stack could not be had"
        return f"a hang: {beat.phase} took more than trainer.hang_timeout_s={self._limit_s:g} s, and {stack}"


def newest_saved(folder: Path, since: float) -> Path | None:
    """The newest complete checkpoint in `folder` that was saved after `since` (seconds since 1970)."""
    found: list[tuple[int, Path]] = []
    for path in folder.glob("global_step_*"):
        match = _CHECKPOINT.fullmatch(path.name)
        with contextlib.suppress(OSError):
            if match and (path / "manifest.json").stat().st_mtime >= since - 1.0:
                found.append((int(match.group(1)), path))
    return max(found)[1] if found else None


def _reap(child: int) -> int | None:
    """Collect the processes that have ended, adopted ones too; the child's status if it is among them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                found = ended[1]
    return found


def _note(heard: int) -> dict[str, str] | None:
    os.set_blocking(heard, False)  # somebody below the child may hold the other end
    try:
        return json.loads(os.read(heard, 2 * _NOTE_BYTES))
    except (OSError, ValueError):
        return None


def _ending(code: int, note: dict[str, str] | None, beat: Beat | None) -> Ending:
    """`code` is an exit code, or minus the signal that ended the process."""
    shown = 128 - code if code < 0 else code
    if note is not None and not note["error"]:
        return Ending(shown, "", True, beat)  # the work was done; what the interpreter did at its end changes nothing
    crash = note is None or code < 0 or code in (_BUG, DeadlineError.exit_code, WorkerLostError.exit_code)
    if note is not None:
        first = note["text"].strip().splitlines()[:1] or [""]  # the run itself has said the rest
        cause = f"{note['error']}: {first[0].split('. ')[0][:_CAUSE_CHARS]}".rstrip(".: ")
    else:
        cause = signal.Signals(-code).name if code < 0 else f"exit code {code} and no error"
    return Ending(shown, cause, crash is False, beat)


def _advice(ending: Ending) -> str:
    if ending.cause == signal.SIGKILL.name:
        return " and at what the system says about its memory (dmesg)"
    return ", and raise trainer.hang_timeout_s if it was only slow" if ending.cause.startswith("a hang") else ""


def _is_held(pid: int) -> bool:
    """Whether somebody has stopped the process or looks into it, or it has just ended: then it does not hang."""
    import psutil

    held = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE)
    try:
        return psutil.Process(pid).status() in held
    except psutil.NoSuchProcess:
        return True


def _without_numbers(text: str) -> str:
    return re.sub(r"\w*\d\w*", "#", text)


def _say(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")  # a progress bar that was killed has left the cursor hidden
    print(f"verl train: {text}", file=sys.stderr, flush=True)
