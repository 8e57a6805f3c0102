"""Processes that need torch, as forks of a process that has it: `python -m MODULE arguments` without six seconds of imports.

Each test process has its own server. It starts when it is first needed and ends with the process. It has imported what is
in warm.py and has run nothing; what a process sets is its own. Its command line is the server's.
"""

import atexit
import importlib
import multiprocessing.forkserver
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.warm"])


def fork(target: Callable[..., object], *arguments: object, daemon: bool = False) -> Any:
    """A started process. The server starts in the folder with tests.warm."""
    here = os.getcwd()
    os.chdir(ROOT)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.chdir(here)
    process = FORKS.Process(target=target, args=arguments, daemon=daemon)
    process.start()
    return process


class Forked:
    """Like a `subprocess.Popen` of `python -m module arguments...`, or of `python FILE arguments...` if `what` is a path;
    both outputs in one pipe, and nothing to read."""

    def __init__(self, what: str | Path, *arguments: object, env: Mapping[str, str], cwd: Path = ROOT):
        self.command = [str(what), *map(str, arguments)]
        ours, theirs = FORKS.Pipe(duplex=False)
        self._process = fork(_run, isinstance(what, Path), self.command, dict(env), str(cwd), theirs)
        theirs.close()
        self.pid = self._process.pid
        self.stdout = os.fdopen(os.dup(ours.fileno()), errors="replace")
        ours.close()
        self._said = ""
        self._reader: threading.Thread | None = None

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    poll = returncode.fget

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.command, timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """The output until all holders of the pipe have ended. After subprocess.TimeoutExpired it may be called again."""
        if self._reader is None:
            self._reader = threading.Thread(target=self._read, daemon=True)
            self._reader.start()
        self._reader.join(timeout)
        if self._reader.is_alive():
            raise subprocess.TimeoutExpired(self.command, timeout or 0.0)
        self.wait(timeout)
        return self._said, None

    def _read(self) -> None:
        self._said = self.stdout.read()

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_forked(what: str | Path, *arguments: object, timeout_s: float, **more) -> tuple[int, str]:
    """(exit code, output) of a `Forked`; at the deadline it is killed, and the test fails with its output."""
    process = Forked(what, *arguments, **more)
    try:
        said, _ = process.communicate(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, said


def fork_instead(popen: type[subprocess.Popen]) -> Callable[..., subprocess.Popen]:
    """`popen` for commands of `python_command`: it runs their module in a fork, and never a program."""

    def start(command: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int], **more) -> subprocess.Popen:
        def run() -> None:
            code = 70
            try:
                open_fds = sorted({0, 1, 2, *pass_fds})
                for low, high in zip(open_fds, [*open_fds[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
                    os.closerange(low + 1, high)  # with the pipe that tells the parent of a start
                sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
                os.environ.clear()
                os.environ.update(env)
                sys.argv = list(command[2:])
                code = importlib.import_module(command[2]).main()
            finally:
                os._exit(code)

        return popen(command, env=env, pass_fds=pass_fds, preexec_fn=run, **more)

    return start


def _run(is_file: bool, command: Sequence[str], env: dict[str, str], cwd: str, output: Connection) -> None:
    """In the fork: what a fresh Python would do."""
    for fd in (1, 2):
        os.dup2(output.fileno(), fd)
    output.close()
    sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    what, *arguments = command
    sys.argv = [what, *arguments]
    try:
        if is_file:
            sys.path.insert(0, str(Path(what).parent))
            runpy.run_path(what, run_name="__main__")
        else:
            runpy.run_module(what, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()
