"""Prints of a scorer, read from a pipe: they can neither fill a disk nor keep a later sample from printing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path

from verl.config.secrets import hide
from verl.foreign_text import clean, printable
from verl.rewards.sandbox.limits import KIB, MIB

MAX_LOG_BYTES = 16 * MIB  # a log that has grown beyond is begun again
_PIPE_BYTES = MIB
_NUM_LAST_BYTES = 2000


class Prints:
    """The read end of the pipe that is a scorer's stdout and stderr; `write_fd` is the other, for the scorer.

    Of each call the first `max_kb` KiB go to the file `log`, if there is one: valid UTF-8, control characters escaped and
    secrets masked. The rest is dropped, and a line says so. While the pipe is full, the scorer waits.
    """

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
        """Read the pipe's content, at most one full pipe: a scorer that prints without end is not waited for. Returns whether
        the pipe was full."""
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
    """Open a file for more lines, after the removal of a link or a pipe that a scorer has put in its place.

    Raises:
        FileNotFoundError: The folder is gone. It stays so: a run whose folder was removed begins nothing there.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.suppress(OSError):
        fd = os.open(path, flags, 0o666)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
    path.unlink(missing_ok=True)
    return os.open(path, flags | os.O_EXCL, 0o666)
