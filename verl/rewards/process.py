"""Handle on one reward worker, a scorer in its sandbox: start, call with a deadline, kill.

Each message carries an id that cannot be guessed, and the scorer answers under it. A write to the channel that is not
that answer ends the worker, so that no sample writes the score of another. While a call runs, the handle also watches
the processes and the processor time of the sandbox, and reads the scorer's prints.

One process scores many samples. Leftovers of a sample (threads, processes, open files, memory) may make a later sample
fail. A sample that fails in such a worker is therefore given to a fresh worker, once: see WorkerLost.
"""

import contextlib
import fcntl
import json
import os
import secrets
import select
import socket
import stat
import tempfile
import time
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from verl.config.secrets import hide, is_secret_name
from verl.data_proto.samples import Score, ScoreRequest
from verl.errors import RewardError
from verl.foreign_text import clean, printable
from verl.parallel.child_processes import python_command
from verl.parallel.framing import encode_frame, frame, read_header
from verl.rewards.outcome import Outcome, checked_outcome
from verl.rewards.sandbox.launch import Sandbox, perhaps_from_outside, remove_folder
from verl.rewards.sandbox.limits import KIB, MIB, Limits
from verl.rewards.sandbox.processes import now_tick

MAX_LOG_BYTES = 16 * MIB  # a log that has grown beyond is begun again
_PIPE_BYTES = MIB
_NUM_LAST_BYTES = 2000


class Prints:
    """The read end of the pipe that is a scorer's stdout and stderr; `write_fd` is the other. Of each call the first `max_kb`
    KiB go to the file `log`: valid UTF-8, control characters escaped and secrets masked. A line says that more is dropped.
    While the pipe is full, the scorer waits."""

    def __init__(self, log: Path | None, max_kb: int):
        self._log = log
        self._log_fd: int | None = None
        self._max_bytes = self._room = max_kb * KIB
        self._unwritten = b""
        self._last = b""
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        with contextlib.suppress(OSError, AttributeError):  # Linux has it, up to a limit for each user
            fcntl.fcntl(self.write_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def read(self) -> bool:
        """Read at most one full pipe: a scorer that prints without end is not waited for. Returns whether it was full."""
        num_read = 0
        with contextlib.suppress(BlockingIOError):
            while num_read < _PIPE_BYTES and (printed := os.read(self._read_fd, _PIPE_BYTES)):
                num_read += len(printed)
                self._last = (self._last + printed)[-_NUM_LAST_BYTES:]
                self._unwritten += printed[: max(0, self._room)]
                self._room -= len(printed)
        lines, end, self._unwritten = self._unwritten.rpartition(b"\n")
        self._write(lines + end)
        return num_read >= _PIPE_BYTES

    def end_call(self) -> None:
        """Read the last prints of a call. Later prints count towards the next call."""
        self.read()
        dropped = f"\n[dropped the rest: reward.max_output_kb={self._max_bytes // KIB}]\n" if self._room < 0 else ""
        self._write(self._unwritten + dropped.encode())
        self._unwritten, self._room = b"", self._max_bytes

    def _write(self, printed: bytes) -> None:
        if self._log is None or not printed:
            return
        text = hide(printable(printed.decode(errors="backslashreplace")))
        with contextlib.suppress(OSError):  # a full disk costs only the log
            if self._log_fd is None:
                self._log_fd = _open_log(self._log)
            if os.fstat(self._log_fd).st_size > MAX_LOG_BYTES:
                os.ftruncate(self._log_fd, 0)
            os.write(self._log_fd, text.encode())

    def last_line(self) -> str:
        lines = self._last.decode(errors="backslashreplace").strip().splitlines()
        return clean(lines[-1], 200) if lines else ""

    def close(self) -> None:
        self.end_call()
        for fd in (self._read_fd, self._log_fd):
            if fd is not None:
                os.close(fd)


def _open_log(path: Path) -> int:
    """Open a file for more lines, in place of a link or a pipe that a scorer made. Its folder is not made again."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.suppress(OSError):
        fd = os.open(path, flags, 0o666)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
    path.unlink(missing_ok=True)
    return os.open(path, flags | os.O_EXCL, 0o666)


START_TIMEOUT_S = 120.0  # a reward function may import torch and more on a cold disk
FORGED = "wrote to the channel on which its result is sent"
_LOOK_EVERY_S = 0.025  # between checks of a working scorer's resources
_FULL_PIPE_S = 0.001  # the scorer waits meanwhile
_LATE_LOOK_S = 1.0  # between two looks: then this process was stopped itself
_ENDING_TIMEOUT_S = 10.0  # for a process with a closed channel to end, on a busy machine
_MAX_ERROR = 2000  # characters of the reason why a function cannot be used
_ERROR_KB = 16  # of the answer for a sample of any result: an error, as JSON


@dataclass
class Job:
    """One call of the reward function: one request, or the batch of a batched function."""

    id: str  # cannot be guessed; the answer repeats it
    requests: list[ScoreRequest]
    message: bytes  # the encoded call
    future: Future[list[Score]] = field(default_factory=Future)
    submitted_s: float = field(default_factory=time.monotonic)


class WorkerLost(Exception):
    """The worker can no longer be used. The message is a predicate of the function or worker ("took longer than 30 s").
    `again`: the cause may lie outside this call (a kill, leftovers of an earlier sample). A fresh worker then gets the call
    once."""

    def __init__(self, what: str, *, again: bool):
        super().__init__(what)
        self.again = again


class WorkerProcess:
    """One scorer in its sandbox. `setup`: see worker.run. Create it on a thread that lives as long as the process (see
    Sandbox). Raises RewardError when the worker reports that the function cannot be used."""

    def __init__(self, setup: dict[str, Any], limits: Limits, log: Path | None = None):
        self._limits = limits
        self._forks = bool(setup["process_per_sample"])  # then no sample leaves anything behind
        self._is_used = False
        self._idle_cpu_s: float | None = None
        self._began_tick = 0  # of the last call
        self._prints = Prints(log, limits.max_output_kb)
        self._folder = tempfile.mkdtemp(prefix="verl_reward_")
        self._channel, channel = socket.socketpair()
        self._channel.setblocking(False)
        command = python_command("verl.rewards.worker", str(channel.fileno()), str(os.getpid()))
        try:
            env = _environment(self._folder, limits.network)
            needed = (self._folder, os.getcwd(), *setup["sys_path"], str(setup["function"]["path"]))
            self.sandbox = Sandbox(
                command, limits, fd=channel.fileno(), output=self._prints.write_fd, env=env, needed=needed
            )
        except OSError:
            self._release()
            raise
        finally:
            channel.close()
            os.close(self._prints.write_fd)
        about = {"limits": asdict(limits), "max_tasks": self.sandbox.max_tasks, "alone": self.sandbox.has_namespaces}
        try:
            message_id = secrets.token_hex(16)
            message = encode_frame({**setup, **about, "id": message_id})
            answer = self._exchange(message, message_id, START_TIMEOUT_S, MIB, watched=False)
        except WorkerLost as error:
            self.close()
            raise RewardError(f"The reward worker did not start: it {error}.") from error
        if "error" in answer:
            self.close()
            raise RewardError(clean(answer["error"], _MAX_ERROR))
        self.sandbox.started()

    @property
    def pid(self) -> int:
        return self.sandbox.pid

    @property
    def alive(self) -> bool:
        return self.sandbox.alive

    def score(self, job: Job, timeout_s: float) -> tuple[list[Outcome], float]:
        """(outcome per sample, seconds) of one call. Raises WorkerLost, the process being dead then."""
        if not self.alive or self._is_readable():
            self.look()
        self._idle_cpu_s = None
        max_bytes = (1 + len(job.requests)) * (self._limits.max_result_kb + _ERROR_KB) * KIB
        answer = self._exchange(job.message, job.id, timeout_s, max_bytes)
        listed, seconds = answer.get("outcomes"), answer.get("seconds")
        outcomes = [checked_outcome(outcome, self._limits) for outcome in listed] if isinstance(listed, list) else []
        if len(outcomes) != len(job.requests) or None in outcomes or not isinstance(seconds, float):
            raise self._lost(FORGED)
        if answer.get("was_limited") and not self._forks:
            lost = self._lost(next((o["error"] for o in outcomes if o and "error" in o), "reached a limit"))
            if lost.again:
                raise lost  # else its state is unknown: the next sample gets another worker
        self._is_used = not self._forks
        return [outcome for outcome in outcomes if outcome is not None], seconds

    def look(self) -> None:
        """Verify that an idle scorer is alive, has written nothing and keeps its limits. Raises WorkerLost."""
        behaviour = None if self.alive else self.sandbox.how_it_ended(0)
        if behaviour is None and self._is_readable():
            behaviour = (not self._has_written() and self.sandbox.how_it_ended(_ENDING_TIMEOUT_S)) or FORGED
        if self._idle_cpu_s is None:
            self._idle_cpu_s = self.sandbox.cpu_seconds()
        if behaviour := behaviour or self.sandbox.excess(self._idle_cpu_s):
            raise self._lost(f"Between two samples the scorer {behaviour}.", again=True)

    def _lost(self, what: str, *, again: bool | None = None) -> WorkerLost:
        """Kill the worker; the error to raise. By default a sample is scored again unless its worker was fresh, or it has
        filled the sandbox with processes by itself."""
        if again is None:
            again = self._is_used and not self.sandbox.has_too_many_since(self._began_tick)
        self.kill()
        return WorkerLost(what, again=again)

    def _is_readable(self) -> bool:
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        return bool(poll.poll(0))

    def _has_written(self) -> bool:
        """Whether there are bytes on the readable channel. It is readable too when the scorer's end has closed it."""
        try:
            return bool(self._channel.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def kill(self) -> None:
        """End the worker with everything that it started. May be called again, and from any thread."""
        self.sandbox.end()

    def close(self) -> None:
        self.kill()
        self._release()

    def _release(self) -> None:
        self._channel.close()
        self._prints.close()
        remove_folder(self._folder)

    def _exchange(
        self, message: bytes, message_id: str, timeout_s: float, max_bytes: int, *, watched: bool = True
    ) -> dict[str, object]:
        """Send a message and return the answer to it. Raises WorkerLost, the process being dead then."""
        received_bytes = self._transfer(frame(message), timeout_s, max_bytes, watched)
        try:
            answer = json.loads(received_bytes)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict) or answer.get("id") != message_id:
            raise self._lost(FORGED)
        return answer

    def _transfer(self, unsent: bytes, timeout_s: float, max_bytes: int, watched: bool) -> bytes:
        """Send `unsent` and receive a message of at most `max_bytes`, within the time limit, and if `watched` the sandbox."""
        received = bytearray()
        self._began_tick, was_stopped, used_s = now_tick(), False, -1.0
        last_look = time.monotonic()
        deadline, look_at = last_look + timeout_s, last_look + _LOOK_EVERY_S
        poll = select.poll()
        while (span := read_header(received)) is None or len(received) < span[1]:
            if span is not None and span[1] - span[0] > max_bytes:
                raise self._lost(f"answered with more than {max_bytes // KIB} KiB")
            now = time.monotonic()
            deadline += now - last_look if now - last_look > _LATE_LOOK_S else 0.0
            last_look = now
            if now >= deadline:
                raise self._late(timeout_s, was_stopped)
            if now >= look_at:
                look_at = now + _LOOK_EVERY_S
                if not self.alive:
                    self._ending()
                was_stopped |= self.sandbox.is_stopped()
                used_s = self.sandbox.cpu_seconds() if used_s < 0 else used_s
                if watched and (excess := self.sandbox.excess(used_s)):
                    raise self._lost(excess)
            poll.register(self._channel, select.POLLIN | (select.POLLOUT if unsent else 0))
            wait_s = _FULL_PIPE_S if self._prints.read() else _LOOK_EVERY_S
            events = dict(poll.poll(wait_s * 1000)).get(self._channel.fileno(), 0)
            try:
                if events & ~select.POLLOUT:
                    received += self._channel.recv(MIB) or self._ending()
                elif events:
                    unsent = unsent[self._channel.send(unsent) :]
            except OSError:
                self._ending()
        self._prints.end_call()
        if len(received) > span[1]:
            raise self._lost(FORGED)
        return bytes(received[span[0] :])

    def _ending(self) -> bytes:
        """Raise for a scorer that can no longer be read; its process ends a moment after its channel."""
        self._prints.read()  # a scorer that prints its end into a full pipe waits
        behaviour = self.sandbox.how_it_ended(_ENDING_TIMEOUT_S) or "closed the channel on which its result is sent"
        self._prints.read()
        last = self._prints.last_line()
        again = perhaps_from_outside(behaviour, last) or None
        raise self._lost(behaviour + (f" (its last words: {last})" if last else ""), again=again)

    def _late(self, timeout_s: float, was_stopped: bool) -> WorkerLost:
        if was_stopped:
            return self._lost(f"was stopped by a signal and did not answer within {timeout_s:g} s", again=True)
        is_shared = self._is_used and self.sandbox.has_tasks_older_than(self._began_tick)
        return self._lost(f"took longer than {timeout_s:g} s", again=is_shared)


def _environment(folder: str, network: bool) -> dict[str, str]:
    """Environment of a worker; without a network it needs no keys and passwords."""
    return {
        **{name: value for name, value in os.environ.items() if network or not is_secret_name(name)},
        "TMPDIR": folder,
        "PYTHONUNBUFFERED": "1",  # the log has the prints before a crash
        "PYTHONHASHSEED": "0",  # scorers that iterate over sets give the same answer in every worker
        "OMP_NUM_THREADS": "1",
    }
