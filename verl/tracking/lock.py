"""One run per folder: a lock file that names its holder, taken over when the holder is dead."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from verl.errors import ConfigError


class FolderLock:
    """Holds `folder`/run.lock between `acquire` and `release`."""

    def __init__(self, folder: Path):
        self.path = folder / "run.lock"
        self._held = False

    def acquire(self) -> None:
        """Raises ConfigError when a live run, or one on another host, which cannot be checked, holds the folder."""
        with self._locked_file() as file:
            holder = _parse(file.read())
            if holder is not None and not _is_dead(holder):
                raise ConfigError(self._in_use(holder))
            file.seek(0)
            file.truncate()
            file.write(json.dumps(_me()))
        self._held = True

    def release(self) -> None:
        """Release the folder; does nothing when it is not held."""
        if self._held:
            self._held = False
            # emptied and not removed: another process may have opened it and must not lock a deleted file
            with self._locked_file() as file:
                file.truncate()

    @contextlib.contextmanager
    def _locked_file(self) -> Iterator[Any]:
        """The open lock file; other processes that start in the folder wait here."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        with os.fdopen(descriptor, "r+", encoding="utf-8") as file:
            with contextlib.suppress(
                OSError
            ):  # without locks, as on some network file systems, the content still decides
                fcntl.flock(file, fcntl.LOCK_EX)
            yield file

    def _in_use(self, holder: dict[str, Any]) -> str:
        who = f"process {holder['pid']} on {holder['host']}"
        if holder["host"] == socket.gethostname():
            fix = "Wait for it, stop it, or set trainer.default_local_dir to another folder."
        else:
            fix = (
                f"If that run has ended, delete {self.path}; otherwise set trainer.default_local_dir to another folder."
            )
        return f"The run folder {self.path.parent} is in use by {who}. {fix}"


def holder_of(folder: Path) -> str | None:
    """The process that runs in `folder`, in words; None for none. Read-only."""
    try:
        holder = _parse((folder / "run.lock").read_text(encoding="utf-8"))
    except OSError:
        return None
    if holder is None or _is_dead(holder):
        return None
    return f"process {holder['pid']} on {holder['host']}"


def _me() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "started": psutil.Process().create_time()}


def _parse(text: str) -> dict[str, Any] | None:
    """The holder in the file; None when it is empty or truncated."""
    try:
        holder = json.loads(text)
        return {"pid": int(holder["pid"]), "host": str(holder["host"]), "started": float(holder["started"])}
    except (ValueError, TypeError, KeyError):
        return None


def _is_dead(holder: dict[str, Any]) -> bool:
    if holder["host"] != socket.gethostname():
        return False
    try:
        process = psutil.Process(holder["pid"])
        # process ids are reused; the start time distinguishes the processes
        return process.status() == psutil.STATUS_ZOMBIE or abs(process.create_time() - holder["started"]) > 2.0
    except psutil.NoSuchProcess:
        return True
