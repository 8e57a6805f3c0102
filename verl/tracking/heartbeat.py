"""A small file of a run folder: heartbeat.json.

    {"pid": 4711, "host": "node1", "step": 12, "phase": "gen", "since": 1763.25}

It has the current step and phase and their start, for the supervisor and for `verl show`. It changes at the
start of each phase and step; the heartbeat of a run that hangs stays the same.
"""

import contextlib
import json
import os
import socket
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from verl.foreign_text import clean
from verl.parallel.stack_dump import dumps_on_signal
from verl.regular_files import open_regular
from verl.tracking.files import has, is_count, is_number, is_text, read_json

EVENTS = "events.jsonl"  # in the same folder: a line for each crash of the run with the action of its supervisor
_WIDTH = 512  # bytes of the file: always overwritten in full, so it is never truncated or replaced
_BEAT = has(pid=is_count, host=is_text, step=is_count, phase=is_text, since=is_number)


@dataclass(frozen=True)
class Beat:
    pid: int
    host: str
    step: int  # in progress; 0 before the first
    phase: str
    since: float  # seconds since 1970


class Heartbeat:
    """Writes `root`/heartbeat.json between `start` and `end`, if `writes`. On a signal, the stacks of this process are written
    to logs/stacks_rank_{rank}.txt there (verl.parallel.stack_dump). A beat costs microseconds: nothing is synced."""

    def __init__(self, root: Path, rank: int = 0, *, writes: bool = True):
        self._file = root / "heartbeat.json" if writes else None
        self._stacks = stacks_file(root, rank)
        self._beat = Beat(os.getpid(), socket.gethostname()[:64], 0, "starting", time.time())
        self._descriptor: int | None = None
        self._open = contextlib.ExitStack()

    def start(self) -> None:
        """Raises OSError when the folder cannot be written."""
        self._beat = replace(self._beat, pid=os.getpid(), since=time.time())
        self._open.enter_context(dumps_on_signal(self._stacks))
        if self._file is not None:
            self._descriptor = open_regular(self._file, os.O_WRONLY | os.O_CREAT)
            self._open.callback(os.close, self._descriptor)
            self._write()

    def end(self, failed: bool = False) -> None:
        """Stop writing; after a failure the last phase stays. Idempotent, and allowed without a start."""
        if not failed:
            self.phase("ended")
        self._descriptor = None
        self._open.close()

    def phase(self, name: str) -> None:
        """Start of a phase."""
        self._beat = replace(self._beat, phase=clean(name, limit=60), since=time.time())
        self._write()

    def begin_step(self, step: int) -> None:
        """Start of step `step`."""
        self._beat = replace(self._beat, step=step, phase="step", since=time.time())
        self._write()

    def _write(self) -> None:
        if self._descriptor is not None:
            text = json.dumps(asdict(self._beat), ensure_ascii=False).encode()
            with contextlib.suppress(OSError):  # code that loses data by a full disk reports it
                os.pwrite(self._descriptor, text.ljust(_WIDTH - 1) + b"\n", 0)


def read_beat(root: Path) -> Beat | None:
    """The last beat of the newest run in `root`; None when there is none."""
    try:
        beat = read_json(root / "heartbeat.json", _BEAT, _WIDTH)
    except (OSError, ValueError):
        return None
    return Beat(beat["pid"], clean(beat["host"]), beat["step"], clean(beat["phase"]), beat["since"])


def stacks_file(root: Path, rank: int) -> Path:
    """The file for the stacks of a rank."""
    return root / "logs" / f"stacks_rank_{rank}.txt"
