"""Ties between a process and its parent, so that no end of a run leaves processes behind. Linux only; elsewhere they do
nothing.

`python_command("verl.parallel.child_processes", PARENT_PID, PROGRAM, ...)` runs PROGRAM and ends it with process PARENT_PID.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

# operations of prctl, from linux/prctl.h
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
_EXITING = 4  # of the flags of a process, from linux/sched.h
END_TIMEOUT_S = 30.0  # for a killed process to end: on a busy machine that takes seconds, and with much memory too


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that runs `module` with this Python and this verl, and never with a module of the current folder
    (verl/parallel/child_main.py)."""
    return [sys.executable, str(Path(__file__).with_name("child_main.py")), module, *arguments]


def die_with(parent: int, signal_number: int = signal.SIGKILL) -> None:
    """Send this process the signal when its `parent` ends; exit if it has ended already. The parent's thread that started this
    process counts, so that must live as long."""
    if prctl(_SET_PDEATHSIG, signal_number) and os.getppid() != parent:
        os._exit(1)


def is_ending(pid: int) -> bool:
    """Whether a process was killed or has exited, though it may still have files open and hold their locks; also if it is
    gone."""
    try:
        with open(f"/proc/{pid}/status") as status, open(f"/proc/{pid}/stat", "rb") as stat:
            pending = [int(line.split()[1], 16) for line in status if line.startswith(("SigPnd", "ShdPnd"))]
            flags = int(stat.read().rpartition(b")")[2].split()[6])
    except (ProcessLookupError, FileNotFoundError):
        return sys.platform == "linux"
    return bool(flags & _EXITING or any(signals >> (signal.SIGKILL - 1) & 1 for signals in pending))


def adopt_orphans() -> bool:
    """From now on this process becomes the parent of orphaned descendants, and can end them."""
    return prctl(_SET_CHILD_SUBREAPER, 1)


@contextlib.contextmanager
def blocked_sigterm() -> Iterator[None]:
    """Processes that this thread starts meanwhile never get SIGTERM, nor do their own. systemd and SLURM send it to every
    process of a job, and a stop needs some of them to save. SIGKILL ends them, and the end of their parent."""
    if sys.platform != "linux":
        yield
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # programs inherit the mask, unlike handlers
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def unblock_sigterm() -> None:
    """Undo `blocked_sigterm` for processes that this thread starts from now on. This process itself ignores the signal. Call
    it on the main thread first."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _ignore)  # no SIG_IGN: programs would inherit it
        in_forks.append(lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    if signal.getsignal(signal.SIGTERM) is _ignore:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _ignore(number: int, frame: FrameType | None) -> None:
    """The process that started this one decides when it ends."""


# Calls that bring back the signal handlers of before: processes that the user's code forks end by `terminate`. A signal may
# reach such a process before the call, so signals wait for it.
in_forks: list[Callable[[], object]] = []
_of_fork = threading.local()


def _before_fork() -> None:
    _of_fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM} if in_forks else ())


def _in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _of_fork.mask)


def _in_child() -> None:
    while in_forks:
        in_forks.pop()()
    _in_parent()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)

_spared: set[int] = set()


def spare(pid: int) -> None:
    """Exempt the process `pid` from `end_descendants` from now on."""
    _spared.add(pid)


def end_descendants() -> int:
    """Send SIGKILL to every process below this one, including processes started meanwhile; returns their number."""
    import psutil

    killed: set[int] = set(_spared)
    while family := [p for p in psutil.Process().children(recursive=True) if p.pid not in killed]:
        for process in family:
            killed.add(process.pid)
            with contextlib.suppress(psutil.Error):
                process.kill()
    return len(killed - _spared)


def prctl(operation: int, value: int, argument: object = None) -> bool:
    """Whether the kernel has set this attribute of the process; never on other systems than Linux."""
    if sys.platform != "linux":
        return False
    unused = ctypes.c_ulong(0)
    third = unused if argument is None else argument
    return bool(ctypes.CDLL(None).prctl(operation, ctypes.c_ulong(value), third, unused, unused) == 0)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
