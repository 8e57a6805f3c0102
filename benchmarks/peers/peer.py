"""The parent's side of measured processes: started in a separate environment, asked one at a time, ended surely."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from peer_env import ROOT, clean_environment

HERE = Path(__file__).resolve().parent
QUIT_LIMIT_S = 20.0
USAGE = ("cpu_before_s", "cpu_s", "peak_rss_bytes", "children_peak_rss_bytes")  # in every answer, see child.py


class PeerFailed(RuntimeError):
    """A measured process reported a failure, died, or did not answer in time."""


class Peer:
    """One measured process: `script` of this folder, run by `python`. Its output goes to `log`."""

    def __init__(
        self,
        name: str,
        script: str,
        *,
        log: Path,
        python: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ):
        self.name, self.log = name, log
        self.idle_share = 0.0  # processor seconds per second of waiting, the worst of all waits
        self.facts: dict[str, Any] = {}  # the answer of the process to "build"
        self._cpu_s, self._answered_at = 0.0, 0.0
        inherited = dict(os.environ) if python is None else clean_environment()
        folders = [HERE.parent] if python else [HERE.parent, ROOT]  # of child.py, and of verl where it is not installed
        path = os.pathsep.join(filter(None, [*map(str, folders), inherited.get("PYTHONPATH")]))
        log.parent.mkdir(parents=True, exist_ok=True)
        read, write = os.pipe()
        self._replies = os.fdopen(read, "rb", buffering=0)
        self._buffer = b""
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(python or sys.executable), str(HERE / script)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(write,),
                cwd=ROOT,
                env={**inherited, **(environment or {}), "PYTHONPATH": path, "REPLY_FD": str(write)},
                start_new_session=True,  # so that its children can be ended with it
            )
        os.close(write)

    def ask(self, command: str, limit_s: float, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for its result; raises PeerFailed with the end of the log after `limit_s` seconds."""
        idle_s = time.monotonic() - self._answered_at
        try:
            self._process.stdin.write((json.dumps({"name": command, "arguments": arguments}) + "\n").encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure(f"ended before {command!r}") from None
        answer = json.loads(self._line(command, limit_s))
        if not answer["ok"]:
            raise self._failure(f"failed in {command!r}: {answer['error']}")
        result = answer["result"]
        if "cpu_before_s" in result and self._answered_at:
            self.idle_share = max(self.idle_share, (result["cpu_before_s"] - self._cpu_s) / max(idle_s, 1.0))
        self._cpu_s, self._answered_at = result["cpu_s"], time.monotonic()
        return result

    def build(self, limit_s: float, command: str = "build", **arguments: Any) -> None:
        """Ask for "build" and keep the answer, without the usage."""
        self.facts = {k: v for k, v in self.ask(command, limit_s, **arguments).items() if k not in USAGE}

    def close(self) -> None:
        """End the process: asked first, then killed."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self._process.stdin.write(b'{"name": "quit", "arguments": {}}\n')
                self._process.stdin.close()
                self._process.wait(QUIT_LIMIT_S)
            self._kill()
        self._replies.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line(self, command: str, limit_s: float) -> bytes:
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._replies], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self._kill()
                raise self._failure(f"did not answer {command!r} within {limit_s:.0f} s")
            piece = self._replies.read(65536)
            if not piece:
                raise self._failure(f"ended in {command!r}")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _kill(self) -> None:
        """End the process and its descendants, if they are still alive."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(QUIT_LIMIT_S)

    def _failure(self, what: str) -> PeerFailed:
        tail = self.log.read_text(errors="replace").splitlines()[-15:]
        return PeerFailed("\n".join([f"{self.name} {what}. The end of {self.log}:", *tail]))


def in_turns(
    peers: Sequence[Peer], rounds: int, limit_s: float, command: str = "step", *, tells_round: bool = False
) -> Iterator[tuple[int, dict[str, dict[str, Any]]]]:
    """(number of the round, answers) of a round to warm up and then `rounds` more; every other round goes the other way round.
    `tells_round`: the command has the number of the round as its `step`."""
    for number in range(rounds + 1):
        arguments = {"step": number} if tells_round else {}
        order = peers if number % 2 == 0 else peers[::-1]
        yield number, {peer.name: peer.ask(command, limit_s, **arguments) for peer in order}
