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
    """Ids of the processes below `pid`, parents first; one that starts or ends meanwhile may be missing.

    Counting stops past `most`, because a fork bomb may grow faster than it is counted.
    """
    found: list[int] = []
    waiting = [pid]
    while waiting and len(found) <= most:
        children = _children(waiting.pop())
        found += children
        waiting += children
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def num_tasks_of_user() -> int:
    """Number of processes and threads of this user on the machine."""
    found = 0
    if not os.path.isdir("/proc"):
        return found
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == os.geteuid():
                found += len(os.listdir(f"/proc/{pid}/task"))
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """Processor time of these processes and of those below them that have ended, in seconds."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat") as file:
            ticks += sum(map(int, file.read().rpartition(")")[2].split()[11:15]))
    return ticks / _TICKS_PER_S


def end_below(pid: int, timeout_s: float, spared: Collection[int] = (), group: int = 0) -> bool:
    """Send SIGKILL to every process below `pid` but `spared` until only zombies are left; False after `timeout_s`.

    `group`: a process group below `pid`, signalled first: the signal reaches all its members at once, those that are
    being forked among them.
    """
    deadline = time.monotonic() + timeout_s
    empty_looks = 0
    while empty_looks < 2:  # orphans change their parent, so that one look may miss some
        if group:
            _signal(os.killpg, [group], signal.SIGKILL)
        found = _stop_below(pid, spared)
        _signal(os.kill, found, signal.SIGKILL)
        alive = [p for p in found if state_of(p) not in "ZX"]
        empty_looks = 0 if alive else empty_looks + 1
        if time.monotonic() > deadline:
            return False
        if alive:
            time.sleep(0.002)
    return True


def _stop_below(pid: int, spared: Collection[int]) -> list[int]:
    """Stop every process below `pid` but `spared`, each before its children are read.

    A stopped process starts no more, so that none is missed but the children of one that ends meanwhile.
    """
    found: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        if parent != pid and parent not in spared:
            _signal(os.kill, [parent], signal.SIGSTOP)
            found.append(parent)
        waiting += _children(parent)
    return found


def reap_descendants(pid: int, timeout_s: float, spared: Collection[int] = ()) -> None:
    """Wait for the zombies that are children of this process, `pid`, but not for `spared`."""
    deadline = time.monotonic() + timeout_s
    while (ended := set(descendants(pid)) - set(spared)) and time.monotonic() < deadline:
        for process in ended:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process, os.WNOHANG)


def _signal(send: Callable[[int, int], None], pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, number)


def state_of(pid: int) -> str:
    """Letter of a process's state in /proc (R, S, T, Z, ...); X when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"
