"""Memory shared by processes of one host: weights for an engine in its own process, and between ranks.

    buckets = SharedBuckets(64 << 20)                    # in the process that has the weights
    for some in bucketed(weights, 64 << 20):
        engine.update(buckets.write(some))               # sends a small description; the engine replies after reading

    for name, tensor in read(description):               # in the process of the engine
        parameters[name].copy_(tensor)

The memory is of verl.parallel.segments.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from verl.errors import ModelError
from verl.parallel.segments import SharedSegment, as_values, open_segment
from verl.reshard.digest import copy_with_digest, digest

_ALIGNMENT = 64  # bytes; of every tensor, so that any dtype can be viewed in place
HEAD_BYTES = 64  # at the start of a segment: the number of the bucket that it holds
Named = tuple[str, torch.Tensor]
Description = dict[str, Any]  # JSON
_MAPPED: dict[tuple[str, tuple[int, int]], torch.Tensor] = {}  # by path and stamp of a segment


class SharedBlock(Protocol):
    """Memory that another process can open by its `place`: `values` uint8 [bytes], on the host or on a device."""

    values: torch.Tensor
    place: Description

    def close(self) -> None: ...


class Buckets:
    """Tensors laid out in two blocks of memory in turn, of `bucket_bytes` each; only a single larger tensor makes a block
    larger. With `keeps` each bucket of an update has its block, which the same bucket of the next update writes over.

    In turn, a description is valid until two further buckets are written: one is filled while the engine reads the other. The
    writer must wait for the engine's reply before it overwrites or closes a bucket.
    """

    def __init__(self, bucket_bytes: int, *, keeps: bool = False):
        assert bucket_bytes >= 1
        self.bucket_bytes, self.keeps = bucket_bytes, keeps
        self._blocks: list[SharedBlock | None] = []
        self._number, self._at = 0, -1  # of buckets written; of the newest one's block

    def begin(self) -> None:
        """An update begins."""
        self._at = -1

    def allocate(self, num_bytes: int) -> SharedBlock:
        """A new block; subclasses choose the kind of memory."""
        raise NotImplementedError

    @property
    def num_bytes(self) -> int:
        """Bytes of memory in use."""
        return sum(block.values.nbytes for block in self._blocks if block is not None)

    def close(self) -> None:
        """Free the memory."""
        for block in self._blocks:
            if block is not None:
                block.close()
        self._blocks = []

    def memory_of(self, at: int) -> torch.Tensor:
        """The memory of bucket `at` of the last update, counted from 0, until this update writes over it; with `keeps`."""
        block = self._blocks[at]
        assert block is not None
        return block.values

    def write(self, tensors: Sequence[Named]) -> Description:
        """Copy tensors [any shape, any device] into the next block, ready to read on return. The result is JSON: number of
        the bucket, entries of name, dtype, shape, offset, nbytes and digest, and the place of the memory.

        Raises ModelError when several tensors exceed a bucket.
        """
        return self.laid_out(tensors)[0]

    def laid_out(self, tensors: Sequence[Named]) -> tuple[Description, torch.Tensor]:
        """As `write`; returns the memory of the bucket too, uint8."""
        entries = lay_out(tensors, self.bucket_bytes)
        description, memory = self.room(entries)
        for (_, tensor), (place, entry) in zip(tensors, _places(memory, entries), strict=True):
            label = _label(entry)
            written = copy_with_digest(label, place.view(tensor.shape), tensor)
            entry.append((digest(label, place) if place.is_cuda else written).hex())
        synchronize(memory)  # the other process does not see this one's stream
        return description, memory

    def room(self, entries: list[list[Any]]) -> tuple[Description, torch.Tensor]:
        """The next bucket, for tensors that will be laid out as `entries`, and its memory, uint8."""
        self._number += 1
        at = self._at = self._at + 1 if self.keeps else self._number % 2
        self._blocks += [None] * (at + 1 - len(self._blocks))
        block, num_bytes = self._blocks[at], _end(entries)
        if block is not None and block.values.nbytes < num_bytes:
            block.close()
            block = self._blocks[at] = None  # freed before the larger one is allocated
        if block is None:
            size = num_bytes if self.keeps else max(num_bytes, HEAD_BYTES + self.bucket_bytes)
            block = self._blocks[at] = self.allocate(size)
        _number_in(block.values).fill_(self._number)  # a reader that still reads the old bucket detects it
        return {"number": self._number, "entries": entries, **block.place}, block.values


class SharedBuckets(Buckets):
    """Buckets in memory of the host."""

    def allocate(self, num_bytes: int) -> SharedSegment:
        return SharedSegment(num_bytes, pins=True)


def bucketed(tensors: Iterable[Named], bucket_bytes: int) -> Iterator[list[Named]]:
    """`tensors` in order, in lists of at most `bucket_bytes`; a larger tensor gets its own list."""
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


def read_shared_bucket(description: Description) -> Iterator[Named]:
    """The tensors of a bucket, in order, as views of the shared memory. Copy each before the reply to the writer.

    Raises WorkerLostError when the writer is gone, and ModelError when the bucket was overwritten or a tensor does not match
    its digest.
    """
    entries = description["entries"]
    return read_bucket(bucket_memory(description), description["number"], entries, [entry[5] for entry in entries])


def bucket_memory(description: Description) -> torch.Tensor:
    """The shared memory of a bucket, uint8. Raises WorkerLostError and ModelError as `open_segment` does."""
    name = f"Bucket {description['number']} of the new weights"
    return _mapped(description["segment"], description["num_bytes"], name)


def _mapped(path: str, num_bytes: int, name: str) -> torch.Tensor:
    """As `open_segment`, once for each segment: a new mapping costs a fault for each of its pages, ten times as long as the
    digest. Segments that are closed are let go of when another is opened."""
    stamp = _stamp(path)
    memory = _MAPPED.get((path, stamp))
    if memory is None or memory.nbytes < num_bytes:
        for mapping in list(_MAPPED):
            if _stamp(mapping[0]) != mapping[1]:
                _MAPPED.pop(mapping, None)
        memory = open_segment(path, num_bytes, name)
        _MAPPED[path, stamp] = memory
    return memory


def _stamp(path: str) -> tuple[int, int]:
    """Device and inode of a segment, which a later one of the same path does not have; zeros if it is not there."""
    with contextlib.suppress(OSError):
        status = os.stat(path)
        return status.st_dev, status.st_ino
    return 0, 0


def read_bucket(
    memory: torch.Tensor, number: int, entries: Sequence[list[Any]], digests: Sequence[str]
) -> Iterator[Named]:
    """The tensors of bucket `number` in `memory`, uint8, as views. Raises ModelError when the bucket was overwritten or a
    tensor does not match its digest."""
    _check_number(memory, number)
    for (values, entry), expected in zip(_places(memory, entries), digests, strict=True):
        if digest(_label(entry), values).hex() != expected:
            _check_number(memory, number)
            raise ModelError(
                f"{entry[0]} in bucket {number} of the new weights does not match its digest. These weights must not be used: "
                "update again, or rebuild the rollout engine."
            )
        yield entry[0], values.view(entry[2])
    synchronize(memory)  # for the reader's copies
    _check_number(memory, number)  # the bucket may have been overwritten while it was copied


def tensor_bytes(memory: torch.Tensor, entries: Sequence[list[Any]]) -> torch.Tensor:
    """The bytes of a bucket's tensors in `memory`, uint8."""
    return memory[HEAD_BYTES : _end(entries)]


def views(memory: torch.Tensor, entries: Sequence[list[Any]]) -> Iterator[Named]:
    """The tensors of a bucket in `memory`, uint8, as views."""
    return ((entry[0], place.view(entry[2])) for place, entry in _places(memory, entries))


def lay_out(tensors: Sequence[Named], bucket_bytes: int) -> list[list[Any]]:
    """Entries of name, dtype, shape, offset and nbytes."""
    entries: list[list[object]] = []
    end = HEAD_BYTES
    for name, tensor in tensors:
        first = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = first + tensor.nbytes
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append([name, dtype, list(tensor.shape), first, tensor.nbytes])
    if len(tensors) > 1 and sum(tensor.nbytes for _, tensor in tensors) > bucket_bytes:
        raise ModelError(
            f"{len(tensors)} tensors starting at {tensors[0][0]} exceed a bucket of {bucket_bytes} bytes; write them in "
            "several buckets."
        )
    return entries


def _places(memory: torch.Tensor, entries: Sequence[list[Any]]) -> Iterator[tuple[torch.Tensor, list[Any]]]:
    """The flat values of each entry in `memory`, uint8."""
    for entry in entries:
        yield as_values(memory, entry[3], entry[4], getattr(torch, entry[1])), entry


def _end(entries: Sequence[list[Any]]) -> int:
    """Bytes from the head of a bucket to the end of its last tensor, aligned."""
    end = max([HEAD_BYTES, *(int(entry[3] + entry[4]) for entry in entries)])
    return -(-end // _ALIGNMENT) * _ALIGNMENT


def _label(entry: Sequence[Any]) -> str:
    return f"{entry[0]} {entry[2]}"


def _number_in(memory: torch.Tensor) -> torch.Tensor:
    """[1]: the number of the bucket in `memory`."""
    return as_values(memory, 0, 8, torch.int64)


def _check_number(memory: torch.Tensor, number: int) -> None:
    if int(_number_in(memory)) != number:
        raise ModelError(
            f"Bucket {number} of the new weights was overwritten before it was read; the writer must wait for the reply to a "
            "bucket before it writes further ones."
        )


def synchronize(memory: torch.Tensor) -> None:
    """Wait for the work on the GPU of `memory`, if it is on one."""
    if memory.is_cuda:
        torch.cuda.synchronize(memory.device)
