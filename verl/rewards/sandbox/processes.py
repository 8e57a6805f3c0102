"""Descendants of a process, read from /proc: their number, the processor time they used, and ending them all.

Without /proc nothing is found.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def descendants(pid: int, most: float = math.inf) -> list[int]:
    """Ids of the processes below `pid`, parents first; a process that starts or ends meanwhile may be missing.

    Counting stops past `most`, because a fork bomb may grow faster than it is counted.
    """
    pids: list[int] = []
    waiting = [pid]
    while waiting and len(pids) <= most:
        children = _children(waiting.pop())
        pids += children
        waiting += children
    return pids


def _children(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                children += map(int, file.read().split())
    return children


def num_tasks_of_user() -> int:
    """Number of processes and threads of this user on the machine."""
    num_tasks = 0
    if not os.path.isdir("/proc"):
        return num_tasks
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == os.geteuid():
                num_tasks += len(os.listdir(f"/proc/{pid}/task"))
    return num_tasks


def cpu_seconds(folders: Iterable[str]) -> float:
    """Processor time of the processes of these folders in /proc and of those below them that have ended, in seconds."""
    return sum(sum(map(int, _stat(folder)[11:15])) for folder in folders) / _TICKS_PER_S


def now_tick() -> int:
    """Clock ticks since the machine started, in which /proc counts the start of a process; 0 where it does not."""
    boot_time = getattr(time, "CLOCK_BOOTTIME", None)
    return 0 if boot_time is None else int(time.clock_gettime(boot_time) * _TICKS_PER_S)


def start_ticks(folders: Iterable[str]) -> list[int]:
    """Start of every thread of the processes of these folders in /proc, in clock ticks since the machine started."""
    ticks = []
    for folder in folders:
        with contextlib.suppress(OSError):
            ticks += [int(_stat(f"{folder}/task/{thread}")[19]) for thread in os.listdir(f"{folder}/task")]
    return ticks


def state_of(pid: int) -> str:
    """Letter of a process's state in /proc (R, S, T, Z, ...); X when there is no such process."""
    return _stat(f"/proc/{pid}")[0]


def _stat(folder: str) -> list[str]:
    """Fields of a process or thread in /proc, from its state on; state X and zeros if it does not exist."""
    with contextlib.suppress(OSError), open(f"{folder}/stat", "rb") as file:
        if fields := file.read().rpartition(b")")[2].split():
            return [field.decode() for field in fields]
    return ["X", *["0"] * 50]


def kill_descendants(timeout_s: float, spared: Collection[int] = (), group: int = 0) -> None:
    """End every process below this one but `spared`, and wait for the ends of its children, at most `timeout_s`.

    `group`: a process group below this process, signalled first. The signal reaches all its members at once, including
    processes that are being forked.
    """
    deadline = time.monotonic() + timeout_s
    num_empty_looks = 0
    while num_empty_looks < 2 and time.monotonic() < deadline:  # orphans change their parent, so one look may miss some
        if group:
            _signal(os.killpg, [group], signal.SIGKILL)
        pids = _stop_below(os.getpid(), spared)
        _signal(os.kill, pids, signal.SIGKILL)
        for process in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process, os.WNOHANG)
        is_empty = all(state_of(process) in "ZX" for process in pids)
        num_empty_looks = num_empty_looks + 1 if is_empty else 0
        if not is_empty:
            time.sleep(0.002)


def _stop_below(pid: int, spared: Collection[int]) -> list[int]:
    """Stop every process below `pid` but `spared`, each before its children are read.

    A stopped process starts no more processes, so that only the children of a process that ends meanwhile can be missed.
    """
    pids: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        if parent != pid and parent not in spared:
            _signal(os.kill, [parent], signal.SIGSTOP)
            pids.append(parent)
        waiting += _children(parent)
    return pids


def _signal(send: Callable[[int, int], None], pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, number)
