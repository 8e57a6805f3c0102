"""Memory that processes of one host share: weights for an engine in a process of its own, and between ranks.

    buckets = SharedBuckets(64 << 20)                    # in the process that has the weights
    for some in bucketed(weights, 64 << 20):
        engine.update(buckets.write(some))               # a small description travels; the engine answers when it has read

    for name, tensor in read(description):               # in the process of the engine
        parameters[name].copy_(tensor)

The memory has no name in any file system: others open it by way of the process that made it, and the kernel frees it when
the last of them has ended, however it ended. Linux only.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from verl.errors import ModelError, WorkerLostError
from verl.reshard.digest import digest

_ALIGNMENT = 64  # bytes; of every tensor, so that any number format can be viewed in place
HEAD_BYTES = 64  # the number of the bucket that lies in a segment
Named = tuple[str, torch.Tensor]


class Segment:
    """`num_bytes` of memory that other processes of this host can open by `path` as long as this one has it."""

    def __init__(self, num_bytes: int):
        if not hasattr(os, "memfd_create"):
            raise ModelError(
                f"Weights cannot be shared between processes on {sys.platform}: there is no memfd. Use Linux, or let the "
                "engine run in the process that trains."
            )
        self._file = os.memfd_create("verl-weights", os.MFD_CLOEXEC)
        try:
            os.truncate(self._file, num_bytes)
            self.memory = mmap.mmap(self._file, num_bytes)
        except BaseException:
            os.close(self._file)
            raise
        self.num_bytes = num_bytes
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def close(self) -> None:
        """Nobody can open it any more; it is freed when those who have it open are done."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def open_segment(path: str, num_bytes: int, what: str) -> mmap.mmap:
    """The memory of a Segment of another process. `what` names it in the WorkerLostError of a process that is gone, or whose
    memory this one cannot open, and in the ModelError of one that is too small."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise WorkerLostError(
            f"{what} cannot be opened ({error.strerror}): the process that wrote it has ended, or is not one of this user on "
            "this host. Start both again, side by side."
        ) from error
    try:
        if os.fstat(file).st_size < num_bytes:
            raise ModelError(
                f"{what} has {os.fstat(file).st_size} bytes where {num_bytes} were announced: send it again."
            )
        return mmap.mmap(file, num_bytes)
    finally:
        os.close(file)


def as_numbers(memory: mmap.mmap, first: int, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    """A stretch of memory as a tensor [numbers], in place. It keeps the memory alive."""
    if num_bytes == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=num_bytes // dtype.itemsize, offset=first)


class SharedBuckets:
    """Tensors laid out in `num_segments` segments in turns, of `bucket_bytes` each; only a tensor that is larger by itself
    makes a segment larger. A description holds until so many further ones were written: with 2, one bucket is filled while
    the engine reads the other. The writer must know by the engine's answer that it has read what is written over."""

    def __init__(self, bucket_bytes: int, num_segments: int = 2):
        assert bucket_bytes >= 1
        assert num_segments >= 1
        self.bucket_bytes = bucket_bytes
        self._segments: list[Segment | None] = [None] * num_segments
        self._number = 0  # of buckets written

    @property
    def num_bytes(self) -> int:
        """Of shared memory in use."""
        return sum(segment.num_bytes for segment in self._segments if segment is not None)

    def write(self, tensors: Sequence[Named]) -> dict[str, Any]:
        """Copy tensors [any shape, any device] into the next segment. The result is JSON: segment, its size, the number of
        the bucket, and entries of name, dtype, shape, offset, nbytes and digest.

        Raises ModelError when several tensors are more than a bucket.
        """
        entries, end = laid_out(tensors, self.bucket_bytes)
        segment = self._next(end)
        segment.memory[:HEAD_BYTES] = _head(-1)  # whoever still reads what was here finds out
        for (name, tensor), entry in zip(tensors, entries, strict=True):
            place = as_numbers(segment.memory, entry[3], entry[4], tensor.dtype)
            place.view(tensor.shape).copy_(tensor.detach())
            entry.append(digest(f"{name} {entry[2]}", place).hex())
        segment.memory[:HEAD_BYTES] = _head(self._number)
        return {"segment": segment.path, "num_bytes": segment.num_bytes, "number": self._number, "entries": entries}

    def close(self) -> None:
        """Give the memory back."""
        for segment in self._segments:
            if segment is not None:
                segment.close()
        self._segments = [None] * len(self._segments)

    def _next(self, num_bytes: int) -> Segment:
        self._number += 1
        at = self._number % len(self._segments)
        segment = self._segments[at]
        if segment is None or segment.num_bytes < num_bytes:
            if segment is not None:
                segment.close()
            segment = self._segments[at] = Segment(max(num_bytes, HEAD_BYTES + self.bucket_bytes))
        return segment


def laid_out(tensors: Sequence[Named], bucket_bytes: int) -> tuple[list[list[Any]], int]:
    """Where tensors lie in a bucket: entries of name, dtype, shape, offset and nbytes, and the bytes of head and tensors.

    Raises ModelError when several tensors are more than a bucket.
    """
    entries: list[list[Any]] = []
    end = HEAD_BYTES
    for name, tensor in tensors:
        first = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = first + tensor.nbytes
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append([name, dtype, list(tensor.shape), first, tensor.nbytes])
    if len(tensors) > 1 and sum(tensor.nbytes for _, tensor in tensors) > bucket_bytes:
        raise ModelError(
            f"{len(tensors)} tensors from {tensors[0][0]} on are more than a bucket of {bucket_bytes} bytes; write them in "
            "several buckets."
        )
    return entries, end


def bucketed(tensors: Iterable[Named], bucket_bytes: int) -> Iterator[list[Named]]:
    """`tensors` in their order, in portions of at most `bucket_bytes`; a larger tensor is a portion of its own."""
    some: list[Named] = []
    size = 0
    for name, tensor in tensors:
        if some and size + tensor.nbytes > bucket_bytes:
            yield some
            some, size = [], 0
        some.append((name, tensor))
        size += tensor.nbytes
    if some:
        yield some


def read(description: dict[str, Any]) -> Iterator[Named]:
    """The tensors of a bucket, in order, as views of the shared memory: copy each before the writer is answered.

    Raises WorkerLostError when the writer is gone, and ModelError when another bucket lies there, or a tensor is not what
    was written.
    """
    number, entries = description["number"], description["entries"]
    memory = open_segment(description["segment"], description["num_bytes"], f"Bucket {number} of the new weights")
    _check_number(memory, number)
    for name, dtype, shape, first, num_bytes, said in entries:
        numbers = as_numbers(memory, first, num_bytes, getattr(torch, dtype))
        if digest(f"{name} {shape}", numbers).hex() != said:
            _check_number(memory, number)
            raise not_as_written(name, number)
        yield name, numbers.view(shape)
    _check_number(memory, number)  # of what was copied while it lay there


def not_as_written(name: str, number: int) -> ModelError:
    """A tensor of bucket `number` whose digest is another one."""
    return ModelError(
        f"{name} in bucket {number} of the new weights is not what was written. These weights must not be used: update again, "
        "or rebuild the rollout engine."
    )


def written_over(number: int) -> ModelError:
    """Another bucket lies where bucket `number` was."""
    return ModelError(
        f"Bucket {number} of the new weights was written over before it was read; its writer must wait for the answer to one "
        "bucket before it writes further ones."
    )


def _head(number: int) -> bytes:
    return number.to_bytes(HEAD_BYTES, "little", signed=True)


def _check_number(memory: mmap.mmap, number: int) -> None:
    lies = int.from_bytes(memory[:HEAD_BYTES], "little", signed=True)
    if lies != number:
        raise written_over(number)
