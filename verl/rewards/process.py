"""The run's handle on one reward worker: start, call with a deadline, kill with everything it started."""

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

from verl.config.secrets import is_secret_name
from verl.errors import RewardError
from verl.parallel.framing import ChannelClosed, ChannelCorrupt, encode, receive, send
from verl.rewards.jobs import Job
from verl.rewards.sandbox.box import remove_folder

START_TIMEOUT_S = 120.0  # a reward function may import torch and more on a cold disk
MAX_LOG_BYTES = 16 << 20
_KILL_TIMEOUT_S = 5.0
_KILLED = "ended its process by SIGKILL"
_FORGED = "wrote to the channel on which its result is sent"


class WorkerLost(Exception):
    """The worker can no longer be used; the message says what the reward function did ("took longer than 30 s")."""


class WorkerGone(WorkerLost):
    """The worker was lost between two calls, or killed by somebody else (the system for its memory, a person): the call can be
    given once to another one."""


class WorkerProcess:
    """One process of the keeper with the scorer in its sandbox. `setup`: see worker.run; `setup["limits"]` are the
    fields of box.Limits. `notices` says what of the box this machine does not grant.

    Start it on a thread that lives as long as the process shall: on Linux it is tied to the thread, so that it dies
    even when the parent is killed by SIGKILL. Raises RewardError when the worker reports that the function cannot be
    used.
    """

    def __init__(self, setup: dict[str, Any], log: Path | None = None):
        self._log: BinaryIO = open(log, "ab+") if log else tempfile.TemporaryFile("ab+")
        self._ended = False
        self._group = 0  # of the scorer, where only that holds its processes
        self._folder = tempfile.mkdtemp(prefix="verl_reward_")
        self._channel, child = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "verl.rewards.sandbox.keeper", str(child.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(child.fileno(),),
                env=_environment(self._folder, bool(setup["limits"]["network"])),
                start_new_session=True,
            )
        except OSError:
            self._channel.close()
            self._log.close()
            remove_folder(self._folder)
            raise
        finally:
            child.close()
        try:
            answer = self._exchange(encode({**setup, "folder": self._folder}), START_TIMEOUT_S)
        except WorkerLost as error:
            self.close()
            raise RewardError(f"The reward worker did not start: it {error}.") from error
        if "error" in answer:
            self.close()
            raise RewardError(answer["error"])
        self.notices: list[str] = answer["notices"]
        self._group = int(answer["group"])

    @property
    def pid(self) -> int:
        return self._process.pid

    def score(self, job: Job, timeout_s: float) -> tuple[list[dict[str, Any]], float]:
        """(outcome per sample, seconds) of one call. Raises WorkerLost, the process being dead then, and WorkerGone when
        the call was not begun."""
        answer = self._exchange(job.message, timeout_s)
        if "not_begun" in answer:
            self.kill()
            raise WorkerGone(str(answer["not_begun"]))
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
        """End the worker with everything that it started now. May be called again, and from any thread."""
        if self._process.poll() is None:
            self._process.terminate()  # the keeper ends its box, and then itself
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_TIMEOUT_S)
        if not self._ended:
            # what a keeper that was killed itself has left
            for group in filter(None, (self._process.pid, self._group)):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILL_TIMEOUT_S)
        self._ended = True
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.kill()
        self._channel.close()
        self._log.close()
        remove_folder(self._folder)

    def _exchange(self, payload: bytes, timeout_s: float) -> dict[str, Any]:
        try:
            self._channel.settimeout(timeout_s)
            send(self._channel, payload)
            answer = receive(self._channel, timeout_s)
        except TimeoutError:
            self.kill()
            raise WorkerLost(f"took longer than {timeout_s:g} s") from None
        except ChannelCorrupt:
            self.kill()
            raise WorkerLost(_FORGED) from None
        except ChannelClosed:
            self.kill()
            raise WorkerGone(f"ended the process that keeps it{self._last_words()}") from None
        if "lost" in answer:
            self.kill()
            words = self._last_words() if "ended" in answer["lost"] else ""
            kind = WorkerGone if _KILLED in answer["lost"] else WorkerLost
            raise kind(f"{answer['lost']}{words}")
        return answer

    def _last_words(self) -> str:
        last = self._last_log_line()
        return f" (its last words: {last})" if last else ""

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


def _environment(folder: str, network: bool) -> dict[str, str]:
    """What a worker sees of our environment; without a network it has no use for keys and passwords."""
    package_root = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH")
    return {
        **{name: value for name, value in os.environ.items() if network or not is_secret_name(name)},
        "TMPDIR": folder,
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
