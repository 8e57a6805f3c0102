"""Processes below another one, read from /proc: how many there are, what they have used, and ending them all.

Where there is no /proc, nothing is found.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterable

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def visible() -> list[int]:
    """Every process that /proc shows: with a /proc of its own, the members of a PID namespace."""
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def descendants(pid: int) -> list[int]:
    """The processes below `pid`, parents first; one that starts or ends meanwhile may be missing."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
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


def cpu_seconds(pids: Iterable[int]) -> float:
    """Processor time of these processes and of those below them that have ended, in seconds."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat") as file:
            ticks += sum(map(int, file.read().rpartition(")")[2].split()[11:15]))
    return ticks / _TICKS_PER_S


def end_all_below(pid: int, timeout_s: float, spared: Collection[int] = ()) -> bool:
    """SIGKILL for every process below `pid` but not for itself and not for `spared`, until there is none but zombies; False
    when some were left after `timeout_s`. They are stopped first, so that they cannot start others as fast as they are
    ended."""
    deadline = time.monotonic() + timeout_s
    stopped: set[int] = set()
    empty_looks = 0
    while empty_looks < 2:  # a look while processes end may miss some of their children
        alive = [p for p in descendants(pid) if p not in spared and not _is_zombie(p)]
        new = set(alive) - stopped
        _signal_all(new, signal.SIGSTOP)
        stopped |= new
        if not new:
            _signal_all(alive, signal.SIGKILL)
            time.sleep(0.002)
        empty_looks = 0 if alive else empty_looks + 1
        if time.monotonic() > deadline:
            _signal_all(alive, signal.SIGKILL)
            return False
    return True


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


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in ("Z", "X")
    except (OSError, IndexError):
        return True
