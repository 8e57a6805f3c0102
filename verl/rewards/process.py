"""Handle on one reward worker, a scorer in its sandbox: start, call with a deadline, kill.

Each message carries an id that cannot be guessed, and the scorer answers under it. A write to the channel that is not
that answer ends the worker, so that no sample writes the score of another. While a call runs, the handle also watches
the processes and the processor time of the sandbox.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import select
import socket
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from verl.config.secrets import is_secret_name
from verl.errors import RewardError
from verl.parallel.framing import encode_frame, frame, read_header
from verl.rewards.jobs import Job
from verl.rewards.sandbox.launch import Sandbox, remove_folder
from verl.rewards.sandbox.limits import MIB, Limits

START_TIMEOUT_S = 120.0  # a reward function may import torch and more on a cold disk
MAX_LOG_BYTES = 16 * MIB
MAX_RESULT_BYTES = 1 * MIB  # of what the function returns for one sample, as JSON
MAX_PARTS = 256  # entries of a returned dict beside the score
MAX_SCORE = 1e18  # its square, which standard deviations need, is still a float32
FORGED = "wrote to the channel on which its result is sent"
_LOOK_EVERY_S = 0.025  # at what a working scorer uses
_ENDING_TIMEOUT_S = 1.0


class WorkerLost(Exception):
    """The worker can no longer be used; the message says what the reward function did ("took longer than 30 s")."""


class WorkerGone(WorkerLost):
    """The worker was lost between two calls, or killed or stopped from outside (by the system for its memory, by a
    person): the call can be given to another one, once."""


class WorkerProcess:
    """One scorer in its sandbox. `setup`: see worker.run. `notices`: protections that this machine does not grant.

    Create it on a thread that lives as long as the process (see Sandbox). Raises RewardError when the worker reports
    that the function cannot be used.
    """

    def __init__(self, setup: dict[str, Any], limits: Limits, log: Path | None = None):
        self._log: BinaryIO = open(log, "ab+") if log else tempfile.TemporaryFile("ab+")
        self._max_log_bytes = MAX_LOG_BYTES
        if limits.max_file_mb is not None:  # one sample's prints must leave room for those of the next
            self._max_log_bytes = min(MAX_LOG_BYTES, limits.max_file_mb * MIB // 2)
        self._folder = tempfile.mkdtemp(prefix="verl_reward_")
        self._channel, channel = socket.socketpair()
        self._channel.setblocking(False)
        command = (sys.executable, "-m", "verl.rewards.worker", str(channel.fileno()), str(os.getpid()))
        try:
            env = _environment(self._folder, limits.network)
            self._sandbox = Sandbox(command, limits, channel.fileno(), env, self._log)
        except OSError:
            self._release()
            raise
        finally:
            channel.close()
        about = {"limits": asdict(limits), "max_tasks": self._sandbox.max_tasks, "alone": self._sandbox.has_namespaces}
        try:
            message_id = secrets.token_hex(16)
            message = encode_frame({**setup, **about, "id": message_id})
            answer = self._exchange(message, message_id, START_TIMEOUT_S, MAX_RESULT_BYTES, watched=False)
        except WorkerLost as error:
            self.close()
            raise RewardError(f"The reward worker did not start: it {error}.") from error
        if "error" in answer:
            self.close()
            raise RewardError(str(answer["error"]))
        self._sandbox.started()

    @property
    def notices(self) -> list[str]:
        return self._sandbox.notices

    @property
    def pid(self) -> int:
        return self._sandbox.pid

    @property
    def alive(self) -> bool:
        return self._sandbox.alive

    def score(self, job: Job, timeout_s: float) -> tuple[list[dict[str, Any]], float]:
        """(outcome per sample, seconds) of one call. Raises WorkerLost, the process being dead then."""
        if not self.alive or self._is_readable():
            self.look()
        answer = self._exchange(job.message, job.id, timeout_s, MAX_RESULT_BYTES * (1 + len(job.requests)))
        outcomes, seconds = answer.get("outcomes"), answer.get("seconds")
        if not _are_outcomes(outcomes, len(job.requests)) or not isinstance(seconds, float):
            self.kill()
            raise WorkerLost(FORGED)
        if answer.get("out_of_memory"):
            self.kill()  # its state after a failed allocation is unknown
        if os.fstat(self._log.fileno()).st_size > self._max_log_bytes:
            self._log.truncate(0)
        assert outcomes is not None
        return [_within_limits(outcome) for outcome in outcomes], seconds

    def look(self) -> None:
        """Verify that an idle scorer is alive, has written nothing and keeps its limits. Raises WorkerGone."""
        behaviour = None if self.alive else self._sandbox.how_it_ended(0)
        if behaviour is None and self._is_readable():
            behaviour = self._sandbox.how_it_ended(_ENDING_TIMEOUT_S) or FORGED  # its end closes the channel too
        if behaviour := behaviour or self._sandbox.excess(math.inf):
            self.kill()
            raise WorkerGone(f"Between two samples the scorer {behaviour}.")

    def _is_readable(self) -> bool:
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        return bool(poll.poll(0))

    def kill(self) -> None:
        """End the worker with everything that it started. May be called again, and from any thread."""
        self._sandbox.end()

    def close(self) -> None:
        self.kill()
        self._release()

    def _release(self) -> None:
        self._channel.close()
        self._log.close()
        remove_folder(self._folder)

    def _exchange(
        self, message: bytes, message_id: str, timeout_s: float, max_bytes: int, *, watched: bool = True
    ) -> dict[str, Any]:
        """Send a message and return the answer to it. Raises WorkerLost, the process being dead then."""
        try:
            answer = json.loads(self._transfer(frame(message), timeout_s, max_bytes, watched))
            if not isinstance(answer, dict) or answer.get("id") != message_id:
                raise WorkerLost(FORGED)
        except WorkerLost:
            self.kill()
            raise
        except (ValueError, RecursionError):
            self.kill()
            raise WorkerLost(FORGED) from None
        return answer

    def _transfer(self, unsent: bytes, timeout_s: float, max_bytes: int, watched: bool) -> bytes:
        """Send `unsent` and receive one message of at most `max_bytes`; enforces the time limit and, if `watched`, the
        limits of the sandbox."""
        received = bytearray()
        deadline = time.monotonic() + timeout_s
        look_at, used_s = time.monotonic() + _LOOK_EVERY_S, -1.0
        poll = select.poll()
        while (span := _span(received, max_bytes)) is None or len(received) < span[1]:
            poll.register(self._channel, select.POLLIN | (select.POLLOUT if unsent else 0))
            events = dict(poll.poll(_LOOK_EVERY_S * 1000)).get(self._channel.fileno(), 0)
            try:
                if events & ~select.POLLOUT:
                    received += self._channel.recv(MIB) or self._ending()
                elif events:
                    unsent = unsent[self._channel.send(unsent) :]
            except OSError:
                self._ending()
            now = time.monotonic()
            if now >= deadline:
                raise self._late(timeout_s)
            if now >= look_at:
                look_at = now + _LOOK_EVERY_S
                if not self.alive:
                    self._ending()
                used_s = self._sandbox.cpu_seconds() if used_s < 0 else used_s
                if watched and (excess := self._sandbox.excess(used_s)):
                    raise WorkerLost(excess)
        begin, end = span
        if len(received) > end:
            raise WorkerLost(FORGED)
        return bytes(received[begin:])

    def _ending(self) -> bytes:
        """Raise for a scorer that can no longer be read; its process ends a moment after its channel."""
        behaviour = self._sandbox.how_it_ended(_ENDING_TIMEOUT_S) or "closed the channel on which its result is sent"
        last = self._last_log_line()
        # unshare 2.38 reports a process 1 that was killed as an error of its own
        from_outside = behaviour.endswith("SIGKILL") or last.startswith("unshare: ")
        kind = WorkerGone if from_outside else WorkerLost
        raise kind(behaviour + (f" (its last words: {last})" if last else ""))

    def _late(self, timeout_s: float) -> WorkerLost:
        if self._sandbox.is_stopped():
            return WorkerGone(f"was stopped by a signal and did not answer within {timeout_s:g} s")
        return WorkerLost(f"took longer than {timeout_s:g} s")

    def _last_log_line(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            size = self._log.seek(0, os.SEEK_END)
            self._log.seek(max(0, size - 2000))
            lines = self._log.read().decode(errors="replace").strip().splitlines()
            return lines[-1][:200] if lines else ""
        return ""


def _span(received: bytearray, max_bytes: int) -> tuple[int, int] | None:
    """(begin, end) of the message; None while its length is not known. Raises WorkerLost for one that is too long."""
    header = read_header(received)
    if header is not None and header[1] - header[0] > max_bytes:
        raise WorkerLost(f"answered with more than the {MAX_RESULT_BYTES // MIB} MiB allowed for a sample")
    return header


def _environment(folder: str, network: bool) -> dict[str, str]:
    """Environment of a worker; without a network it needs no keys and passwords."""
    package_root = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH")
    return {
        **{name: value for name, value in os.environ.items() if network or not is_secret_name(name)},
        "TMPDIR": folder,
        "PYTHONPATH": package_root + (os.pathsep + inherited if inherited else ""),
        "PYTHONUNBUFFERED": "1",  # the log has what was printed before a crash
        "PYTHONHASHSEED": "0",  # scorers that iterate over sets give the same answer in every worker
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


def _within_limits(outcome: dict[str, Any]) -> dict[str, Any]:
    """The outcome, or an error for values that later steps cannot use: too large, or too many."""
    if "error" in outcome:
        return {"error": outcome["error"][:2000]}
    parts = outcome["parts"]
    if len(parts) > MAX_PARTS:
        return {"error": f"returned a dict with {len(parts)} parts; at most {MAX_PARTS} are allowed"}
    for name, value in {"score": outcome["score"], **parts}.items():
        if isinstance(value, (int, float)) and abs(value) > MAX_SCORE:
            return {"error": f"returned a number beyond {MAX_SCORE:g} as {name[:40]!r}, whose square is no float32"}
    return outcome
