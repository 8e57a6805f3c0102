"""Memory that processes of one host share.

It has no name in any file system: other processes open it through /proc of the process that made it, and the kernel frees it
when the last of them has ended, even by a kill. Linux only.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
from typing import NamedTuple

import torch

from verl.errors import ModelError, WorkerLostError
from verl.parallel.pinned import page_lock

_FLAGS = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # Linux
_TOKEN_BYTES = 16


class SharedSegment:
    """`num_bytes` of memory, viewed as `values` uint8 [num_bytes]. Other processes of this host can open it by `path` until
    it is closed here. With `pins` a GPU of this process copies to and from it at full speed."""

    def __init__(self, num_bytes: int, *, pins: bool = False):
        if not hasattr(os, "memfd_create"):
            raise ModelError(
                f"Weights cannot be shared between processes on {sys.platform}: it has no memfd. Use Linux, or run the engine "
                "in the process that trains."
            )
        self._file = os.memfd_create("verl-weights", os.MFD_CLOEXEC)
        try:
            os.truncate(self._file, num_bytes)
            self.values = as_bytes(mmap.mmap(self._file, num_bytes))
        except BaseException:
            os.close(self._file)
            raise
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.place = {"segment": self.path, "num_bytes": num_bytes}
        self._unpin = page_lock(self.values) if pins else lambda: None

    def close(self) -> None:
        """Prevent further opens; the memory is freed when every process that has it open is done."""
        if self._file >= 0:
            self._unpin()
            os.close(self._file)
            self._file = -1


def open_segment(path: str, num_bytes: int, name: str) -> torch.Tensor:
    """The memory of another process's Segment, uint8 [num_bytes]. Errors call it `name`: WorkerLostError when the process is
    gone or its memory is not accessible here, ModelError when it is too small."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise WorkerLostError(
            f"{name} cannot be opened ({error.strerror}): the process that wrote it has ended, or belongs to another user or "
            "host. Start both again, side by side."
        ) from error
    try:
        if os.fstat(file).st_size < num_bytes:
            raise ModelError(
                f"{name} has {os.fstat(file).st_size} bytes where {num_bytes} were announced: send it again."
            )
        return as_bytes(mmap.mmap(file, num_bytes, _FLAGS))
    finally:
        os.close(file)


def as_bytes(memory: mmap.mmap) -> torch.Tensor:
    """A uint8 tensor over `memory`; it keeps the memory alive."""
    return torch.frombuffer(memory, dtype=torch.uint8)


def as_values(memory: torch.Tensor, first: int, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    """The bytes `first` to `first + num_bytes` of `memory`, uint8, as a flat view of `dtype`."""
    return memory[first : first + num_bytes].view(dtype)


class SegmentCard(NamedTuple):
    """The place of a segment, for ranks that may or may not reach it: host names are unreliable with containers, and on another
    host the path may be something else. So the segment begins with `token`."""

    host: str
    path: str
    num_bytes: int
    token: bytes

    @classmethod
    def of(cls, segment: SharedSegment) -> SegmentCard:
        """Writes a new token into `segment`."""
        token = os.urandom(_TOKEN_BYTES)
        segment.values[:_TOKEN_BYTES] = torch.frombuffer(bytearray(token), dtype=torch.uint8)
        return cls(socket.gethostname(), segment.path, segment.values.nbytes, token)

    def open(self, rank: int) -> torch.Tensor | None:
        """The memory of `rank`, uint8; None if this process does not reach it."""
        if self.host != socket.gethostname():
            return None
        try:
            memory = open_segment(self.path, self.num_bytes, f"The memory of rank {rank}")
        except (ModelError, WorkerLostError, OSError, ValueError):
            return None
        return memory if bytes(memory[:_TOKEN_BYTES].tolist()) == self.token else None


def try_segment(num_bytes: int) -> SharedSegment | None:
    """A segment of at least `num_bytes`, with room for a token; None if the system has none."""
    try:
        return SharedSegment(max(num_bytes, _TOKEN_BYTES))
    except (ModelError, OSError):
        return None
