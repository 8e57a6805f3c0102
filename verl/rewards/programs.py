"""Run a program that a model wrote in a separate process, inside the sandbox of the scorer that runs it.

The program has its own limits, no network, and a folder that is removed; all processes that it starts are ended. The caller
judges the program by its output. The expected output never enters the program's process.
"""

import contextlib
import math
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from verl.parallel.child_processes import adopt_orphans, die_with
from verl.rewards.sandbox.launch import describe_exit, remove_folder
from verl.rewards.sandbox.limits import MIB, set_limit
from verl.rewards.sandbox.processes import descendants, filter_system_calls, kill_descendants

_POLL_EVERY_S = 0.025
_NUM_LAST_BYTES = 4000  # of a program's stderr


@dataclass(frozen=True)
class ProgramLimits:
    """Limits of one program: seconds on the clock, MiB of address space of each process, MiB of each file that it writes, its
    prints among them, and processes at once."""

    time_s: float = 5.0
    memory_mb: int = 1024
    max_output_mb: int = 16
    max_processes: int = 16


@dataclass(frozen=True)
class Output:
    """Output and end of a program: `failure` is "" when it ended by itself with exit code 0."""

    stdout: str
    stderr: str  # the end of it
    failure: str

    @property
    def ok(self) -> bool:
        return not self.failure


def run_program(source: str, stdin: str = "", limits: ProgramLimits | None = None) -> Output:
    """Run a Python program with `stdin` and wait for its end, at most `limits.time_s`. Call it in a reward function, whose
    sandbox also confines a program that evades its own limits.

    >>> run_program("print(int(input()) + 1)", "41").stdout
    '42\\n'
    """
    limits = limits or ProgramLimits()
    folder = Path(tempfile.mkdtemp(prefix="program_"))
    try:
        (folder / "program.py").write_text(source, encoding="utf-8", errors="replace")
        (folder / "stdin").write_text(stdin, encoding="utf-8", errors="replace")
        adopt_orphans()
        spared = frozenset(descendants(os.getpid()))
        with (
            open(folder / "stdin", "rb") as input_file,
            open(folder / "stdout", "w+b") as out,
            open(folder / "stderr", "w+b") as err,
        ):
            process = subprocess.Popen(
                [sys.executable, "-s", "-B", "program.py"],
                stdin=input_file,
                stdout=out,
                stderr=err,
                cwd=folder,
                env=_environment(folder),
                start_new_session=True,
                preexec_fn=partial(_confine, limits, os.getpid()),
            )
            try:
                failure = _wait(process, limits, spared)
            finally:
                _end_all(process, spared)
            out.seek(0)
            printed = out.read(limits.max_output_mb * MIB).decode(errors="replace")
            err.seek(max(0, err.seek(0, os.SEEK_END) - _NUM_LAST_BYTES))
            ended = describe_exit(process.returncode) if process.returncode else ""
            return Output(printed, err.read().decode(errors="replace"), failure or ended)
    finally:
        remove_folder(str(folder))


def _environment(folder: Path) -> dict[str, str]:
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",  # a program that walks over a set prints the same each time
        "PYTHONUTF8": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def _confine(limits: ProgramLimits, parent: int) -> None:
    """Limit the new process before it becomes the program."""
    set_limit(resource.RLIMIT_CORE, 0)
    set_limit(resource.RLIMIT_CPU, math.ceil(limits.time_s) + 1)
    set_limit(resource.RLIMIT_FSIZE, limits.max_output_mb * MIB)
    set_limit(resource.RLIMIT_AS, limits.memory_mb * MIB)
    die_with(parent)
    filter_system_calls(sockets=False, groups=False)


def _wait(process: subprocess.Popen[bytes], limits: ProgramLimits, spared: frozenset[int]) -> str:
    """Wait for the end of the process; the limit it exceeds as a sentence, or ""."""
    deadline = time.monotonic() + limits.time_s
    while not _ends_within(process, min(_POLL_EVERY_S, max(deadline - time.monotonic(), 0.001))):
        if time.monotonic() >= deadline:
            return f"took longer than {limits.time_s:g} s"
        limit = limits.max_processes + 1  # the program itself is one
        if len(set(descendants(os.getpid(), len(spared) + limit)) - spared) > limit:
            return f"started more than {limits.max_processes} processes"
    return ""


def _ends_within(process: subprocess.Popen[bytes], wait_s: float) -> bool:
    try:
        handle = os.pidfd_open(process.pid)  # type: ignore[attr-defined, unused-ignore]
    except (AttributeError, OSError):  # not on every system
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
    else:
        try:
            select.select([handle], [], [], wait_s)
        finally:
            os.close(handle)
    return process.poll() is not None


def _end_all(process: subprocess.Popen[bytes], spared: frozenset[int]) -> None:
    """End the program and all that it has started. The kernel lets none of a group start another one after the signal; the
    walk is for systems without the filter of `_confine`: there, a process may leave its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    kill_descendants(spared)
