"""The parent's handle on one reward worker: start, call with a deadline, kill with everything it started."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

from verl.errors import RewardError
from verl.rewards.jobs import Job
from verl.rewards.wire import ChannelClosed, ChannelCorrupt, encode, receive, send

START_TIMEOUT_S = 120.0  # a reward function may import torch and more on a cold disk
MAX_LOG_BYTES = 16 << 20
_FORGED = "wrote to the channel on which its result is sent"


class WorkerLost(Exception):
    """The worker can no longer be used; the message says what the reward function did ("took longer than 30 s")."""


class WorkerProcess:
    """One `python -m verl.rewards.worker`.

    Start it on a thread that lives as long as the process shall: on Linux it is tied to the thread, so that it dies
    even when the parent is killed by SIGKILL. Raises RewardError when the worker reports that the function cannot be
    used.
    """

    def __init__(self, setup: dict[str, Any], log: Path | None = None):
        self._log: BinaryIO = open(log, "ab+") if log else tempfile.TemporaryFile("ab+")
        self._channel, child = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "verl.rewards.worker", str(child.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(child.fileno(),),
                env=_environment(),
                start_new_session=True,
            )
        except OSError:
            self._channel.close()
            self._log.close()
            raise
        finally:
            child.close()
        try:
            answer = self._exchange(encode(setup), START_TIMEOUT_S)
        except WorkerLost as error:
            self.close()
            raise RewardError(f"The reward worker did not start: it {error}.") from error
        if "error" in answer:
            self.close()
            raise RewardError(answer["error"])

    @property
    def pid(self) -> int:
        return self._process.pid

    def score(self, job: Job, timeout_s: float) -> tuple[list[dict[str, Any]], float]:
        """(outcome per sample, seconds) of one call. Raises WorkerLost, the process being dead then."""
        answer = self._exchange(job.message, timeout_s)
        outcomes, seconds = answer.get("outcomes"), answer.get("seconds")
        if (
            answer.get("id") != job.number
            or not _are_outcomes(outcomes, len(job.requests))
            or not isinstance(seconds, float)
        ):
            self.kill()
            raise WorkerLost(_FORGED)
        if answer.get("out_of_memory"):
            self.kill()  # what a failed allocation left behind is anyone's guess
        self._cut_log()
        assert outcomes is not None
        return outcomes, seconds

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End the worker and its whole process group now. May be called again, and from any thread."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.kill()
        self._channel.close()
        self._log.close()

    def _exchange(self, payload: bytes, timeout_s: float) -> dict[str, Any]:
        try:
            self._channel.settimeout(timeout_s)
            send(self._channel, payload)
            return receive(self._channel, timeout_s)
        except TimeoutError:
            self.kill()
            raise WorkerLost(f"took longer than {timeout_s:g} s") from None
        except ChannelCorrupt:
            self.kill()
            raise WorkerLost(_FORGED) from None
        except ChannelClosed:
            reason = self._ending()
            self.kill()
            raise WorkerLost(reason) from None

    def _ending(self) -> str:
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "closed the channel on which its result is sent"
        last = self._last_log_line()
        said = f" (its last words: {last})" if last else ""
        if code < 0:
            return f"ended its process by {signal.Signals(-code).name}{said}"
        return f"ended its process with exit code {code}{said}"

    def _last_log_line(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            size = self._log.seek(0, os.SEEK_END)
            self._log.seek(max(0, size - 2000))
            lines = self._log.read().decode(errors="replace").strip().splitlines()
            return lines[-1][:200] if lines else ""
        return ""

    def _cut_log(self) -> None:
        if os.fstat(self._log.fileno()).st_size > MAX_LOG_BYTES:  # a print per sample must not fill the disk
            self._log.truncate(0)


def _environment() -> dict[str, str]:
    package_root = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": package_root + (os.pathsep + inherited if inherited else ""),
        "PYTHONUNBUFFERED": "1",  # what was printed before a crash is in the log
        "PYTHONHASHSEED": "0",  # scorers that walk over sets give the same answer in every worker
        "OMP_NUM_THREADS": "1",
    }


def _are_outcomes(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count and all(_is_outcome(v) for v in value)


def _is_outcome(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    if "error" in value:
        return isinstance(value["error"], str)
    score = value.get("score")
    return isinstance(score, float) and math.isfinite(score) and isinstance(value.get("parts"), dict)
