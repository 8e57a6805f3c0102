"""Processes below another one, read from /proc: how many there are, what they have used, and ending them all.

Where there is no /proc, nothing is found.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Collection, Iterable, Iterator

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def visible() -> list[int]:
    """Every process that /proc shows: with a /proc of its own, the members of a PID namespace."""
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def descendants(pid: int, most: float = math.inf) -> list[int]:
    """The processes below `pid`, parents first; one that starts or ends meanwhile may be missing. The look ends when it has
    seen more than `most`: those who multiply faster than they can be counted would keep it going."""
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
    """Processes and threads of this user on the machine."""
    found = 0
    for pid in visible():
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


def end_all_below(pid: int, timeout_s: float, spared: Collection[int] = (), group: int = 0) -> bool:
    """SIGKILL for every process below `pid` but not for itself and not for `spared`, until there is none but zombies; False
    when some were left after `timeout_s`. `group`: a process group below `pid`, which is ended first: a signal to a group
    reaches all its members in one moment, those that are being forked among them, however many there are."""
    deadline = time.monotonic() + timeout_s
    empty_looks = 0
    with _ahead_of_others():
        while empty_looks < 2:  # orphans change their parent, so that one look may miss some
            _signal_group(group, signal.SIGKILL)
            found = _stop_below(pid, spared)
            _signal_all(found, signal.SIGKILL)
            alive = [p for p in found if not _is_zombie(p)]
            empty_looks = 0 if alive else empty_looks + 1
            if time.monotonic() > deadline:
                return False
            if alive:
                time.sleep(0.002)
    return True


def _stop_below(pid: int, spared: Collection[int]) -> list[int]:
    """Stop every process below `pid` but `spared`, each before its children are read: once the signal is sent it starts no
    more, so that none is missed but the children of one that ends meanwhile."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        if parent != pid and parent not in spared:
            _signal_all([parent], signal.SIGSTOP)
            found.append(parent)
        waiting += _children(parent)
    return found


@contextlib.contextmanager
def _ahead_of_others() -> Iterator[None]:
    """Hundreds of processes that want the processor leave whoever shall end them a hundredth of it. Where this user may, he
    comes before them; where not, nothing changes."""
    try:
        before = os.sched_getscheduler(0), os.sched_getparam(0)
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except (AttributeError, OSError):
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, *before)


def reap_all_below(pid: int, timeout_s: float, spared: Collection[int] = ()) -> None:
    """Bury the zombies that were left to this process, `pid`, but not those that others will wait for."""
    deadline = time.monotonic() + timeout_s
    while (ended := set(descendants(pid)) - set(spared)) and time.monotonic() < deadline:
        for process in ended:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process, os.WNOHANG)


def _signal_all(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _signal_group(group: int, number: int) -> None:
    if group:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in ("Z", "X")
    except (OSError, IndexError):
        return True
