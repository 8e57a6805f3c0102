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
    while alive := [p for p in descendants(pid) if p not in spared and not _is_zombie(p)]:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in alive:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process, number)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in ("Z", "X")
    except (OSError, IndexError):
        return True
