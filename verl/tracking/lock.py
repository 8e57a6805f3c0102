"""One run per folder: locks of the kernel on the folder and on run.lock. That file names the holder.

Both locks belong to open descriptors, so a run cannot come in by deleting run.lock, and the end of the process frees the
folder. For file systems without such locks, and for other hosts, the content of run.lock decides.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import psutil

from verl.errors import ConfigError, FolderLostError
from verl.foreign_text import clean
from verl.parallel.child_processes import END_TIMEOUT_S, is_ending
from verl.regular_files import open_regular
from verl.tracking.files import has, is_count, is_number, is_text, read_json

log = logging.getLogger(__name__)

_MAX_BYTES = 4096
_HOLDER = has(pid=lambda value: is_count(value) and 0 < value < 1 << 31, host=is_text, started=is_number)
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE)

_held: set[int] = set()  # descriptors; a child that is forked shall not hold the folder after this process


def _close_in_child() -> None:
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_close_in_child)


def _close(descriptor: int) -> None:
    if descriptor in _held:
        _held.discard(descriptor)
        os.close(descriptor)


class FolderLock:
    """Holds `folder` between `acquire` and `release`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.path = folder / "run.lock"
        self._folder = self._file = -1  # descriptors
        self._holder: dict[str, object] = {}

    def acquire(self) -> None:
        """Take the folder, once a run on this host that was killed has ended.

        Raises ConfigError if a live run holds the folder, or a run on another host, since that cannot be checked. Raises
        OSError if the folder or run.lock cannot be opened."""
        deadline = time.monotonic() + END_TIMEOUT_S
        while True:
            try:
                return self._acquire()
            except ConfigError:
                holder = _read(self.path)
                if holder is None or not _is_ending(holder) or time.monotonic() >= deadline:
                    raise
                time.sleep(0.02)

    def _acquire(self) -> None:
        try:
            self._folder = self._taken(os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            self._file = self._taken(open_regular(self.path, os.O_RDWR | os.O_CREAT))
            holder = _read(self.path)
            if holder is not None and not _is_dead(holder):
                raise ConfigError(self._in_use(holder))
            started = psutil.Process().create_time()
            self._holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": started}
            self._write()
        except BaseException:
            self.release()
            raise

    def _taken(self, descriptor: int) -> int:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ConfigError(self._in_use(_read(self.path))) from None
        except OSError:
            pass  # no such lock on this file system: the content of run.lock decides
        _held.add(descriptor)
        return descriptor

    def _write(self) -> None:
        text = json.dumps({**self._holder, "written": time.time()}).encode()
        os.pwrite(self._file, text, 0)
        os.ftruncate(self._file, len(text))

    def check(self) -> None:
        """Raises FolderLostError when the acquired folder was replaced, or another run has it. A run.lock that was deleted or
        damaged is replaced. Does nothing when the folder is not held."""
        if not self._holder:
            return
        try:
            stat = os.stat(self.folder)
        except OSError as error:
            if error.errno in _GONE:
                raise FolderLostError(f"The run folder {self.folder} was removed while the run was using it.") from None
            return  # a disk that fails says so when it is written
        holder = _read(self.path)
        if not os.path.samestat(stat, os.fstat(self._folder)) and not self._shows_writes():
            raise FolderLostError(f"The run folder {self.folder} was replaced by another while the run was using it.")
        if holder is None or any(holder[name] != value for name, value in self._holder.items()):
            if holder is not None and not _is_dead(holder):
                raise FolderLostError(f"{self.path} was changed while the run was using it. {self._in_use(holder)}")
            self._replace()

    def _shows_writes(self) -> bool:
        """Whether run.lock in the folder is the open file. Some network file systems number a file differently each time."""
        with contextlib.suppress(OSError, ValueError):
            self._write()
            os.fsync(self._file)
            return bool(read_json(self.path, _HOLDER, _MAX_BYTES) == json.loads(os.pread(self._file, _MAX_BYTES, 0)))
        return False

    def _replace(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
            _close(self._file)
            self._file = self._taken(open_regular(self.path, os.O_RDWR | os.O_CREAT))
            self._write()
            log.warning("%s was deleted or changed while the run was using it; it is replaced.", self.path)

    def release(self) -> None:
        """Release the folder; does nothing when it is not held."""
        if self._holder and self._file in _held:
            # emptied and not removed: another process may have opened it and must not lock a deleted file
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, 0)
        for descriptor in (self._file, self._folder):
            _close(descriptor)
        self._folder = self._file = -1
        self._holder = {}

    def _in_use(self, holder: Mapping[str, object] | None) -> str:
        is_here = holder is None or holder["host"] == socket.gethostname()
        fix = "Wait for it, stop it, or set trainer.default_local_dir to another folder."
        if not is_here:
            fix = (
                f"If that run has ended, delete {self.path}; otherwise set trainer.default_local_dir to another folder."
            )
        return f"The run folder {self.folder} is in use by {_named(holder)}. {fix}"


def holder_of(folder: Path) -> str | None:
    """The process that runs in `folder`, in words; None for none. Read-only."""
    holder = _read(folder / "run.lock")
    return None if holder is None or _is_dead(holder) else _named(holder)


def stop_holder(folder: Path) -> bool:
    """Send SIGTERM to the run in `folder`; whether there was one on this host. A run.lock may be anyone's text, so a process
    that does not have it open gets nothing."""
    holder = _read(folder / "run.lock")
    if holder is None or holder["host"] != socket.gethostname() or _is_dead(holder):
        return False
    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process(holder["pid"])
        if any(os.path.samefile(file.path, folder / "run.lock") for file in process.open_files()):
            process.terminate()
            return True
    return False


def _named(holder: Mapping[str, object] | None) -> str:
    return "another process" if holder is None else f"process {holder['pid']} on {clean(holder['host'])}"


def _read(path: Path) -> dict[str, object] | None:
    """The holder in the file; None when there is none."""
    try:
        return cast("dict[str, object]", read_json(path, _HOLDER, _MAX_BYTES))
    except (OSError, ValueError):
        return None


def _is_ending(holder: Mapping[str, object]) -> bool:
    pid = holder["pid"]
    return holder["host"] == socket.gethostname() and isinstance(pid, int) and is_ending(pid)


def _is_dead(holder: Mapping[str, object]) -> bool:
    if holder["host"] != socket.gethostname():
        return False
    try:
        process = psutil.Process(holder["pid"])
        # process ids are reused; the start time distinguishes the processes
        return process.status() == psutil.STATUS_ZOMBIE or bool(abs(process.create_time() - holder["started"]) > 2.0)
    except psutil.NoSuchProcess:
        return True
