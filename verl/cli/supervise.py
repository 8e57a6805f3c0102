"""The supervisor of `verl train`: the run is its child process. It watches the child and restarts it after a crash.

The supervisor forks before torch is imported, so it is small. The child has its terminal, its input and its config, and its
exit code is the supervisor's. After a crash a new child resumes from the newest checkpoint, at most `trainer.max_restarts`
times without a new checkpoint in between. Two crashes with the same cause in the same step end the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from verl.config import TrainerConfig
from verl.errors import DeadlineError, WorkerLostError
from verl.foreign_text import clean
from verl.parallel.child_processes import adopt_orphans, die_with, end_descendants
from verl.parallel.stack_dump import dump_of, in_debugger, innermost
from verl.tracking.files import append_rows
from verl.tracking.heartbeat import EVENTS, Beat, read_beat, stacks_file

_WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
_TICK_S = 0.25
_MAX_TICK_S = 5.0  # a longer tick means that this process was stopped, and the run with it
_DUMP_S = 3.0
_MAX_BACKOFF_S = 300.0
_RAYLET = "raylet"
_BUG = 70  # exit code of the command line for an unexpected error
_MAX_CAUSE_CHARS = 300
_MAX_NOTE_BYTES = 3000
_CHECKPOINT = re.compile(r"global_step_(\d+)")


@dataclass(frozen=True)
class Ending:
    """The end of a child. `cause` completes "the run ended with"; a `final` end is no crash."""

    code: int
    cause: str
    final: bool
    beat: Beat | None  # the child's last heartbeat
    error: str = ""  # that the child has sent

    @property
    def place(self) -> str:
        if self.beat is None:
            return "during start-up"
        return f"in step {self.beat.step} ({self.beat.phase})" if self.beat.step else f"in {self.beat.phase}"

    def repeats(self, other: Ending | None) -> bool:
        """Whether cause and place are the same; numbers in the cause (process ids, seconds, addresses) may differ."""
        return other is not None and self.place == other.place and _masked(self.cause) == _masked(other.cause)


@dataclass(frozen=True)
class Life:
    """The part of a process in a run. A supervisor has the exit `code` of its last child. A child has none: it trains.

    Life(saved=Path("run/global_step_40"), is_restart=True)     # the second child
    """

    code: int | None = None
    saved: Path | None = None  # the newest checkpoint that this run has saved
    is_restart: bool = False  # after a crash


@contextlib.contextmanager
def supervise(folder: Path, rules: TrainerConfig) -> Iterator[Life]:
    """Run the block in a child process after the other, until one has ended well or for good; `folder` is the run folder.

    As `fork`, this enters the block in each child, and in this process after the last child, with its exit code. On a system
    without `sigtimedwait`, the block runs in this process, unsupervised.
    """
    if not hasattr(signal, "sigtimedwait"):
        yield Life()
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an inherited SIG_IGN would discard the exit status of a child
    adopt_orphans()
    supervisor = Supervisor(folder, rules)
    parent = os.getpid()
    while True:
        reader, writer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            os.close(reader)
            die_with(parent)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            with _reporting(writer):
                yield Life(None, supervisor.saved, supervisor.has_restarted)
            return
        os.close(writer)
        try:
            code = supervisor.decide(supervisor.watch(child, reader))
        finally:
            os.close(reader)
        if code is not None:
            while signal.sigtimedwait(_WATCHED, 0):  # pending signals were meant for the run, and it has ended
                pass
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            yield Life(code)
            return


@contextlib.contextmanager
def _reporting(writer: int) -> Iterator[None]:
    """Send an error of the block to the supervisor, which sees only an exit code otherwise."""
    try:
        yield
    except BaseException as error:
        _send(writer, {"error": type(error).__name__, "text": str(error)})
        raise
    _send(writer, {"error": "", "text": ""})


def _send(writer: int, note: dict[str, str]) -> None:
    with contextlib.suppress(OSError):  # the supervisor may have died
        os.write(writer, json.dumps({k: v[: _MAX_NOTE_BYTES // 6] for k, v in note.items()}).encode())


def _receive(reader: int) -> dict[str, str] | None:
    os.set_blocking(reader, False)  # a descendant of the child may hold the other end open
    try:
        return cast("dict[str, str]", json.loads(os.read(reader, 2 * _MAX_NOTE_BYTES)))
    except (OSError, ValueError):
        return None


class Supervisor:
    """Watches one child after the other, and decides after each whether to start another."""

    def __init__(self, folder: Path, rules: TrainerConfig):
        self.folder = folder
        self.rules = rules
        self.saved: Path | None = None  # the newest checkpoint that this run has saved
        self._began = time.time()
        self._identity: os.stat_result | None = None  # of the folder, since the run was seen to use it
        self._num_restarts = 0  # since that checkpoint
        self._last: Ending | None = None
        self._stop_requested = False

    @property
    def has_restarted(self) -> bool:
        """Whether the next child is a restart of this run."""
        return self._last is not None

    def watch(self, child: int, reader: int) -> Ending:
        """Wait for the child's end. Signals that stop the run are forwarded to it; a child that hangs is killed."""
        pulse = Pulse(self.folder, child, self.rules.hang_timeout_s)
        hang = ""
        ended: dict[str, int] = {}
        while (status := _reap(child, ended)) is None:
            signal_info = signal.sigtimedwait(_WATCHED, _TICK_S)
            if signal_info is not None and signal_info.si_signo != signal.SIGCHLD:
                self._forward(signal_info, child)
            self._identity = self._identity or _identity(self.folder)
            if not hang and (hang := pulse.hang()):
                os.kill(child, signal.SIGKILL)
        beat = read_beat(self.folder)
        last = beat if beat is not None and beat.pid == child else None
        if hang:
            return Ending(DeadlineError.exit_code, hang, False, last)
        return _ending(os.waitstatus_to_exitcode(status), _receive(reader), last, ended)

    def _forward(self, info: Any, child: int) -> None:
        self._stop_requested = True
        if info.si_code <= 0:  # sent only to this process; a signal of the terminal has reached the child as well
            os.kill(child, info.si_signo)

    def decide(self, ending: Ending) -> int | None:
        """The exit code; or None, after a wait, if the run is to be restarted."""
        if ending.final or self._stop_requested:
            return ending.code
        end_descendants()
        has_ended = ending.beat is not None and ending.beat.phase == "ended" and not ending.error
        if has_ended and _has_summary(self.folder, self._began):
            _say(
                f"The run has taken all of its steps. Its process then ended with {ending.cause}; nothing is left to do."
            )
            return 0
        now = _identity(self.folder)
        if self._identity is not None and (now is None or not os.path.samestat(self._identity, now)):
            _say(
                f"The run ended {ending.place} with {ending.cause}. It is not restarted: its folder {self.folder} was replaced."
            )
            return ending.code
        saved = newest_saved(self.folder, self._began)
        if saved != self.saved:
            self.saved, self._num_restarts = saved, 0
        self._num_restarts += 1
        repeated = ending.repeats(self._last)
        self._last = ending
        end = f"{ending.place} with {ending.cause}"
        if repeated or self._num_restarts > self.rules.max_restarts:
            self._record("gave up", ending)
            times = (
                "twice in a row in the same way" if repeated else f"{self._num_restarts} times without a new checkpoint"
            )
            _say(
                f"The run ended {times}, last {end}. It is not restarted: look at {self.folder / 'logs'}{_advice(ending)}; "
                "then run the same command to resume."
            )
            return ending.code
        wait_s = min(self.rules.restart_backoff_s * 2 ** (self._num_restarts - 1), _MAX_BACKOFF_S)
        place = f"from {self.saved.name}" if self.saved else "from its start"
        self._record("restarted", ending)
        _say(
            f"The run ended {end}. It resumes {place} in {wait_s:g} s "
            f"(restart {self._num_restarts} of {self.rules.max_restarts})."
        )
        return self._pause(wait_s)

    def _pause(self, wait_s: float) -> int | None:
        until = time.monotonic() + wait_s
        while (left_s := until - time.monotonic()) > 0:
            signal_info = signal.sigtimedwait(_WATCHED, left_s)
            if signal_info is not None and signal_info.si_signo != signal.SIGCHLD:
                _say("interrupted.")
                return 128 + signal_info.si_signo
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
        with contextlib.suppress(OSError):  # a folder that cannot be written must not prevent the restart
            self.folder.mkdir(parents=True, exist_ok=True)
            append_rows(self.folder / EVENTS, [row])


class Pulse:
    """The time since the last change of the child's heartbeat, from its first heartbeat on: waits during start-up have
    their own deadlines. A limit of 0 turns the check off."""

    def __init__(self, folder: Path, child: int, limit_s: float):
        self._folder, self._child, self._limit_s = folder, child, limit_s
        self._beat: Beat | None = None
        self._still_s = 0.0
        self._ticked = time.monotonic()

    def hang(self) -> str:
        """A description of the child's hang; "" while there is none."""
        now = time.monotonic()
        passed_s, self._ticked = min(now - self._ticked, _MAX_TICK_S), now
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
        dump = "" if _is_paused(self._child) else dump_of(self._child, file, _DUMP_S)
        if _is_paused(self._child) or in_debugger(dump) or read_beat(self._folder) != beat:
            self._still_s = 0.0
            return ""
        stack = f"it was in {innermost(dump)}; all stacks are in {file}" if dump else "its stack is unknown"
        return f"a hang: {beat.phase} took more than trainer.hang_timeout_s={self._limit_s:g} s, and {stack}"


def _identity(folder: Path) -> os.stat_result | None:
    try:
        return os.stat(folder)
    except OSError:
        return None


def _has_summary(folder: Path, since: float) -> bool:
    """Whether the run has written its summary, as after its last step."""
    with contextlib.suppress(OSError):
        return (folder / "summary.json").stat().st_mtime >= since
    return False


def newest_saved(folder: Path, since: float) -> Path | None:
    """The newest complete checkpoint in `folder` that was saved after `since` (seconds since 1970)."""
    checkpoints: list[tuple[int, Path]] = []
    for path in folder.glob("global_step_*"):
        match = _CHECKPOINT.fullmatch(path.name)
        with contextlib.suppress(OSError):
            if match and (path / "manifest.json").stat().st_mtime >= since - 1.0:
                checkpoints.append((int(match.group(1)), path))
    return max(checkpoints)[1] if checkpoints else None


def _reap(child: int, ended_names: dict[str, int]) -> int | None:
    """Collect the processes that have ended, adopted ones too; the child's status if it is among them. `ended_names` gets
    the names and ids of the adopted processes."""
    child_status: int | None = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            with contextlib.suppress(OSError):
                ended_names[Path(f"/proc/{ended.si_pid}/comm").read_text().strip()] = ended.si_pid
            _, status = os.waitpid(ended.si_pid, 0)
            child_status = status if ended.si_pid == child else child_status
    return child_status


def _ending(
    code: int, note: dict[str, str] | None, beat: Beat | None, ended: Mapping[str, int] | None = None
) -> Ending:
    """The ending of an exit code, or of a signal given as a negative code. `ended`: see `_reap`."""
    number = 128 - code if code < 0 else code
    if note is not None and not note["error"]:
        return Ending(number, "", True, beat)  # the work was complete; a crash of the interpreter's exit is harmless
    crash = note is None or code < 0 or code in (_BUG, DeadlineError.exit_code, WorkerLostError.exit_code)
    if note is not None:
        first = note["text"].strip().splitlines()[:1] or [""]  # the run itself has printed all of it
        cause = clean(f"{note['error']}: {first[0].split('. ')[0]}", limit=_MAX_CAUSE_CHARS).rstrip(".: ")
    else:
        cause = signal.Signals(-code).name if code < 0 else f"exit code {code} and no error"
        if code == 1 and (raylet := (ended or {}).get(_RAYLET)):  # Ray's library ends a process with a lost raylet
            cause = f"the end of Ray's {_RAYLET} (pid {raylet}), without which Ray lets no run continue"
    was_asked = code == -signal.SIGTERM  # before the run could handle it
    return Ending(number, cause, was_asked or not crash, beat, note["error"] if note else "")


def _advice(ending: Ending) -> str:
    if ending.cause == signal.SIGKILL.name:
        return " and at the system's messages about memory (dmesg)"
    return ", and raise trainer.hang_timeout_s if the run was only slow" if ending.cause.startswith("a hang") else ""


def _is_paused(pid: int) -> bool:
    """Whether the process is stopped, traced by a debugger, or has just ended: then it does not hang."""
    import psutil

    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return True
    return status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE)


def _masked(text: str) -> str:
    return re.sub(r"\w*\d\w*", "#", text)


def _say(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")  # a killed progress bar has left the cursor hidden
    print(f"verl train: {text}", file=sys.stderr, flush=True)
