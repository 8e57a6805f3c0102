"""The child's side of a measured process: one JSON line in, one JSON line out. Needs only psutil, which TRL has too.

A child is a script that calls `serve({"build": ..., "step": ...})`. Between commands it blocks in a read, so it costs no
processor time while another child is measured. It dies with its parent.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil


class Channel:
    """Commands from the parent on standard input; replies on the descriptor that REPLY_FD names, so that whatever
    libraries print cannot get between them."""

    def __init__(self) -> None:
        die_with_parent()
        self._replies = os.fdopen(int(os.environ["REPLY_FD"]), "w", encoding="utf-8")
        self._cpu_before_s = 0.0  # processor time when the command came, spent since the last answer

    def commands(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(name, arguments) of each command, until the parent says `quit` or is gone."""
        for line in sys.stdin:
            message = json.loads(line)
            if message["name"] == "quit":
                return
            self._cpu_before_s = cpu_seconds()
            yield message["name"], message["arguments"]

    def reply(self, result: dict[str, Any] | None = None) -> None:
        self._write({"ok": True, "result": {**(result or {}), "cpu_before_s": self._cpu_before_s, **usage()}})

    @contextlib.contextmanager
    def failures(self) -> Iterator[None]:
        """Tell the parent of an error and end; the traceback goes to this process's log."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self._write({"ok": False, "error": f"{type(error).__name__}: {error}"})
            raise SystemExit(1) from error

    def _write(self, message: dict[str, Any]) -> None:
        self._replies.write(json.dumps(message) + "\n")
        self._replies.flush()


def serve(handlers: dict[str, Callable[..., dict[str, Any] | None]]) -> None:
    """Answer commands with the functions of their names until the command to quit."""
    channel = Channel()
    for name, arguments in channel.commands():
        with channel.failures():
            channel.reply(handlers[name](**arguments))


def run_held(run: Callable[..., None]) -> None:
    """Call `run(channel, **arguments)` with the first command's arguments. It replies when it is built, and takes the further
    commands itself: a trainer whose loop is held between steps. An error goes to the parent."""
    channel = Channel()
    if command := next(channel.commands(), None):
        with channel.failures():
            run(channel, **command[1])


def usage() -> dict[str, float]:
    """Processor seconds of this process so far, and the most memory that it and its children have held (bytes)."""
    children = sum(map(high_water_mark, descendants(os.getpid())))
    peak = high_water_mark(os.getpid())
    return {"cpu_s": cpu_seconds(), "peak_rss_bytes": peak, "children_peak_rss_bytes": children}


def cpu_seconds() -> float:
    """User and system time so far of this process and those below it, all threads."""
    spent = resource.getrusage(resource.RUSAGE_SELF)
    return spent.ru_utime + spent.ru_stime + sum(map(_cpu_seconds_of, descendants(os.getpid())))


def _cpu_seconds_of(pid: int) -> float:
    with contextlib.suppress(psutil.Error):  # a process that has just ended
        return sum(psutil.Process(pid).cpu_times()[:2])
    return 0.0


def high_water_mark(pid: int) -> int:
    """Peak resident memory of a process in bytes; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    kilobytes = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    return 1024 * kilobytes[0] if kilobytes else 0


def descendants(pid: int) -> list[int]:
    """Processes below `pid`."""
    with contextlib.suppress(psutil.Error):
        return [process.pid for process in psutil.Process(pid).children(recursive=True)]
    return []


def die_with_parent() -> None:
    """SIGKILL for this process when its parent ends, however it ends."""
    parent = os.getppid()
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if parent == 1:
        os._exit(1)
