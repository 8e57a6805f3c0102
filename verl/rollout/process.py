"""Client of an engine in a separate process. Calls have a deadline, and the engine ends with the process that started it.

    process = EngineProcess("vLLM", "verl.rollout.vllm.process:start", setup, environment={}, start_timeout_s=300, ...)
    process.call("poll", 1.0)        # see process_main for the other side

A call raises WorkerLostError as soon as the socket of a dead process closes. A process that exceeds the deadline of a call is
killed, and the call raises DeadlineError.
"""

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.config import full_key
from verl.errors import DeadlineError, WorkerLostError, error_of
from verl.parallel.child_processes import END_TIMEOUT_S, blocked_sigterm, python_command
from verl.parallel.framing import ChannelClosed, ChannelCorrupt, receive_bytes, send
from verl.parallel.serialize import from_bytes, to_bytes
from verl.parallel.stack_dump import dump_of, innermost

_STACK_S = 3.0  # for a process past its deadline to dump its stack
# set by torchrun for the process that starts the engine; the engine is not one of its ranks
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


class Child:
    """A process of `command` in its own session, with its output in a log that is deleted with it. `environment` is added to
    this process's environment."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], pass_fds: tuple[int, ...] = ()):
        self.log = tempfile.TemporaryFile("ab+")
        with blocked_sigterm():
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                pass_fds=pass_fds,
                env=_environment(environment),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_died(self) -> bool:
        """Whether the process has ended by itself."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End the process with everything that it started. May be called again."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        self.log.close()

    def ending(self) -> str:
        """The end of the process, as a clause, with the last line of its log."""
        try:
            code = self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"closed its connection{self.last_words()}"
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{how}{self.last_words()}"

    def last_words(self) -> str:
        """The last line of the log, in brackets."""
        size = self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, size - 4000))
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        return f" (last line of its log: {lines[-1][:300]})" if lines else ""


class EngineProcess:
    """Starts verl/rollout/process_main.py. That process makes its engine by `factory` ("module:function") out of `setup`
    (JSON). `environment` is added to this process's.

    On Linux it is tied to the thread that makes it: make it on a thread that lives as long as the run. Raises the factory's
    error, WorkerLostError when the process ends, DeadlineError when it is not ready after `start_timeout_s`.
    """

    def __init__(
        self,
        name: str,
        factory: str,
        setup: Mapping[str, object],
        *,
        environment: dict[str, str],
        start_timeout_s: float,
        call_timeout_s: float,
    ):
        self.name, self.call_timeout_s = name, call_timeout_s
        self._channel, child = socket.socketpair()
        try:
            command = python_command("verl.rollout.process_main", str(child.fileno()), str(os.getpid()))
            self._child = Child(command, environment, pass_fds=(child.fileno(),))
        finally:
            child.close()
        try:
            self._exchange([factory, setup], "starting", start_timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def has_ended(self) -> bool:
        """Whether calls have no answer any more: it was closed, here or because it was lost."""
        return self._child.log.closed

    def call(self, method: str, *arguments: object) -> Any:
        """The result of a method of the engine; arguments and result are values of verl.parallel.serialize. Raises the error of
        the method, WorkerLostError or DeadlineError."""
        return self._exchange([method, list(arguments)], method, self.call_timeout_s)

    def close(self) -> None:
        """End the process with everything that it started. May be called again."""
        self._child.close()
        self._channel.close()

    def _exchange(self, message: Sequence[object], doing: str, timeout_s: float) -> object:
        if self.has_ended:
            raise WorkerLostError(f"The {self.name} process (pid {self.pid}) has ended; start the run again.")
        try:
            self._channel.settimeout(timeout_s)
            send(self._channel, to_bytes(message))
            result, error = from_bytes(receive_bytes(self._channel, timeout_s))
        except TimeoutError:
            last = self._stack() or self._child.last_words()
            self.close()
            raise DeadlineError(
                f"The {self.name} process (pid {self.pid}) was silent for {timeout_s:g} s during '{doing}', and was "
                f"ended{last}. Raise {full_key('nccl_timeout')} if it needs longer, or start the run again."
            ) from None
        except (ChannelClosed, ChannelCorrupt):
            ending = self._child.ending()
            self.close()
            raise WorkerLostError(
                f"The {self.name} process (pid {self.pid}) {ending} during '{doing}'. Its samples and weights are "
                "not used; start the run again, which resumes from the last checkpoint."
            ) from None
        if error is not None:
            raise error_of(*error)
        return result

    def _stack(self) -> str:
        """The function that the process is in, if it still answers the signal of process_main."""
        dump = dump_of(self.pid, Path(f"/proc/self/fd/{self._child.log.fileno()}"), _STACK_S)
        where = innermost(dump)
        return f" (it was in {where})" if where else ""


def _environment(added: dict[str, str]) -> dict[str, str]:
    package_root = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH")
    variables = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
    path = package_root + (os.pathsep + inherited if inherited else "")
    return {**variables, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **added}
