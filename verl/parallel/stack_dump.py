"""Stacks and running calls of a process, for the timeout errors of processes that wait for it.

with calls("critic.update"):          # this thread runs a call that another process waits for
    ...
stuck = longest_call(at_least_s=450)  # from any other thread: "critic.update for 512 s, in all_reduce (ranks.py:40) < ..."
"""

import contextlib
import faulthandler
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil

# asks a process of a run for its stacks: rarely used by launchers and schedulers, unlike SIGUSR1
DUMP_SIGNAL = signal.SIGUSR2

_DEPTH = 5  # innermost frames that are named
_NUM_OTHERS = 2
_WAITS = ("threading.py", "queue.py", "_base.py")  # of the standard library, for threads that wait for another one
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')

_running: dict[int, list[tuple[str, float]]] = {}  # thread -> its calls, outermost first, with their beginnings


@contextlib.contextmanager
def calls(name: str) -> Iterator[None]:
    """This thread is busy with `name` while the block runs."""
    mine = _running.setdefault(threading.get_ident(), [])
    mine.append((name, time.monotonic()))
    try:
        yield
    finally:
        mine.pop()
        if not mine:
            _running.pop(threading.get_ident(), None)


def longest_call(at_least_s: float = 0.0) -> str:
    """The call that has been running longest, with its innermost frames; "" when none has for `at_least_s` seconds."""
    frames = sys._current_frames()
    busy = [(mine[-1], thread) for thread, mine in list(_running.items()) if mine and thread in frames]
    if not busy:
        return ""
    (name, began), thread = min(busy, key=lambda entry: entry[0][1])
    seconds = time.monotonic() - began
    if seconds < at_least_s:
        return ""
    stack = traceback.extract_stack(frames[thread])[-_DEPTH:]
    return f"{name} for {seconds:.0f} s, in {_joined((f.filename, f.lineno or 0, f.name) for f in reversed(stack))}"


def all_stacks() -> str:
    """The stack of every thread, outermost frame first, for a log."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        parts.append(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(parts)


class Reporter:
    """A thread that calls `report(stuck)` again and again while a call of this process takes longer than `after_s`;
    `stuck` is what `longest_call` says. It looks a few times within that time, and costs nothing else."""

    def __init__(self, after_s: float, report: Callable[[str], None]):
        self._after_s = after_s
        self._report = report
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stacks", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(min(self._after_s / 4, 5.0)):
            stuck = longest_call(self._after_s)
            if stuck:
                self._report(stuck)

    def close(self) -> None:
        """Report no more; does not wait."""
        self._ended.set()


@contextlib.contextmanager
def dumps_on_signal(file: Path) -> Iterator[None]:
    """While entered, DUMP_SIGNAL writes the stacks of all threads to the end of `file`, in the middle of any work. A file that
    nothing was written to is removed."""
    with file.open("ab") as stream:
        faulthandler.register(DUMP_SIGNAL, stream, all_threads=True)
        try:
            yield
        finally:
            faulthandler.unregister(DUMP_SIGNAL)
            with contextlib.suppress(OSError):
                if os.fstat(stream.fileno()).st_size == 0:
                    file.unlink(missing_ok=True)


def dump_of(pid: int, file: Path, timeout_s: float) -> str:
    """The stacks of process `pid`, inside of its `dumps_on_signal(file)`, on DUMP_SIGNAL; "" when nothing has come within
    `timeout_s` or the process is gone."""
    try:
        before = file.stat().st_size
        os.kill(pid, DUMP_SIGNAL)
    except OSError:
        return ""
    until, size = time.monotonic() + timeout_s, before
    while time.monotonic() < until:
        time.sleep(0.05)
        now = file.stat().st_size
        if now == size > before or not psutil.pid_exists(pid):  # it has stopped growing
            break
        size = now
    with file.open("rb") as stream:
        stream.seek(before)
        return stream.read().decode("utf-8", errors="replace")


def innermost(dump: str) -> str:
    """The innermost frames of the main thread in a dump of `dumps_on_signal`: "write (store.py:12) < save (...)". When
    the main thread waits for another thread, the frames of some threads that do not wait are included."""
    threads = [[match.groups() for line in part.splitlines() if (match := _FRAME.match(line))] for part in _parts(dump)]
    *side_threads, main = [frames[:_DEPTH] for frames in threads if frames] or [[]]
    chosen = [main]
    if main and Path(main[0][0]).name in _WAITS:
        chosen += [frames for frames in side_threads if Path(frames[0][0]).name not in _WAITS][:_NUM_OTHERS]
    return ", while another thread was in ".join(
        _joined((file, int(line), name) for file, line, name in frames) for frames in chosen
    )


def in_debugger(dump: str) -> bool:
    """Whether a thread of the dump stands at a breakpoint."""
    files = {Path(match.group(1)).name for line in dump.splitlines() if (match := _FRAME.match(line))}
    return bool(files & {"pdb.py", "bdb.py", "pydevd.py"})


def _parts(dump: str) -> list[str]:
    """One part a thread; the main thread, being the oldest, comes last."""
    return dump.strip().split("\n\n")


def _joined(frames: Iterable[tuple[str, int, str]]) -> str:
    return " < ".join(f"{name} ({Path(file).name}:{line})" for file, line, name in frames)
