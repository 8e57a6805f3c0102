"""New weights for an engine in another process by way of the GPU's memory: buckets that it opens by a handle, so that nothing
passes through the host.

    buckets = DeviceBuckets(256 << 20, device)           # the turns and the proof of verl.reshard.shared_memory.SharedBuckets
    for some in bucketed(weights, 256 << 20):
        engine.update(buckets.write(some))               # the engine answers when it has read

    for name, tensor in read(description):               # in the process of the engine; buckets on the host as well
        parameters[name].copy_(tensor)

Whether another process can open such memory depends on the machine: containers, parts of a GPU (MIG), GPUs that do not reach
each other. DevicePortions tries it once, and where it fails buckets go by memory of the host.
"""

from __future__ import annotations

import base64
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from verl.errors import ModelError
from verl.reshard import cuda_ipc, shared_memory
from verl.reshard.cuda_ipc import Refused
from verl.reshard.digest import digest
from verl.reshard.shared_memory import Named, bucketed, laid_out, not_as_written, written_over

log = logging.getLogger(__name__)

Description = dict[str, Any]  # JSON

_MOST_BYTES = 256 << 20  # in a bucket: larger ones are no faster on a device, and its memory is wanted for more
_OWN: weakref.WeakValueDictionary[str, torch.Tensor] = weakref.WeakValueDictionary()  # a process cannot open its own


class DeviceBuckets:
    """Tensors laid out in `num_segments` blocks of a GPU's memory in turns, of `bucket_bytes` each; only a tensor that is
    larger by itself makes a block larger. A description holds until so many further ones were written; the writer must know
    by the engine's answer that it has read what is written over, or given back by `close`."""

    def __init__(self, bucket_bytes: int, device: torch.device, num_segments: int = 2):
        assert bucket_bytes >= 1
        assert num_segments >= 1
        self.bucket_bytes, self.device = bucket_bytes, device
        self._segments: list[tuple[torch.Tensor, dict[str, Any]] | None] = [None] * num_segments
        self._number = 0  # of buckets written

    @property
    def num_bytes(self) -> int:
        """Of the device's memory in use."""
        return sum(segment[0].nbytes for segment in self._segments if segment is not None)

    def write(self, tensors: Sequence[Named]) -> Description:
        """Copy tensors [any shape, any device] into the next block, where others may read when this returns. The result is
        JSON: number of the bucket, entries of name, dtype, shape, offset, nbytes and digest, and under "device" where it is.

        Raises ModelError when several tensors are more than a bucket, cuda_ipc.Refused when the device gives no such memory.
        """
        entries, num_bytes = laid_out(tensors, self.bucket_bytes)
        memory, place = self._next(num_bytes)
        _number_in(memory).fill_(-1)  # whoever still reads what was here finds out
        for (name, tensor), entry in zip(tensors, entries, strict=True):
            numbers = _numbers(memory, entry[3], entry[4], tensor.dtype)
            numbers.view(tensor.shape).copy_(tensor.detach())
            entry.append(digest(f"{name} {entry[2]}", numbers).hex())
        _number_in(memory).fill_(self._number)
        _wait(memory)  # the other process does not see this one's stream
        digests = [entry[5] for entry in entries]
        return {
            "number": self._number,
            "entries": entries,
            "device": {**place, "number": self._number, "digests": digests},
        }

    def close(self) -> None:
        """Give the memory back."""
        self._segments = [None] * len(self._segments)

    def _next(self, num_bytes: int) -> tuple[torch.Tensor, dict[str, Any]]:
        self._number += 1
        at = self._number % len(self._segments)
        segment = self._segments[at]
        if segment is None or segment[0].nbytes < num_bytes:
            segment = self._segments[at] = None  # before the next one is taken
            wanted = max(num_bytes, shared_memory.HEAD_BYTES + self.bucket_bytes)
            memory, handle = cuda_ipc.allocate(wanted, self.device)
            token = os.urandom(16).hex()
            _OWN[token] = memory
            place = {
                "token": token,
                "uuid": cuda_ipc.uuid_of(self.device),
                "handle": base64.b64encode(handle).decode(),
                "num_bytes": wanted,
            }
            segment = self._segments[at] = (memory, place)
        return segment


def read(description: Description) -> Iterator[Named]:
    """The tensors of a bucket, in order, as views of the memory where they are: copy each on the stream that is current here,
    before the writer is answered. A bucket that has no "device" is read from the memory of the host.

    Raises ModelError when the memory cannot be opened, another bucket lies there, or a tensor is not what was written; for
    the host what verl.reshard.shared_memory.read raises.
    """
    place = description.get("device")
    if place is None:
        yield from shared_memory.read(description)
        return
    number = place["number"]
    memory = _OWN.get(place["token"])
    if memory is None:
        memory = _opened(place)
    _check_number(memory, number)
    for (name, dtype, shape, first, num_bytes, _), said in zip(description["entries"], place["digests"], strict=True):
        numbers = _numbers(memory, first, num_bytes, getattr(torch, dtype))
        if digest(f"{name} {shape}", numbers).hex() != said:
            _check_number(memory, number)
            raise not_as_written(name, number)
        yield name, numbers.view(shape)
    _wait(memory)  # for the copies
    _check_number(memory, number)  # of what was copied while it lay there


class DevicePortions:
    """All weights of an update as described buckets: on `device` where `settle` found that the engine can open it, otherwise
    on the host by `place` (number of the bucket, tensors), and by both if `keeps`, for an engine that may be lost."""

    def __init__(
        self,
        device: torch.device,
        bucket_bytes: int,
        place: Callable[[int, Sequence[Named]], Description],
        *,
        keeps: bool,
    ):
        self._device, self._place, self._keeps = device, place, keeps
        self._bucket_bytes = min(bucket_bytes, _MOST_BYTES)
        self._settled = self._is_direct = False

    def settle(self, try_bucket: Callable[[Description], None]) -> None:
        """Find out, once, whether buckets can go by the device: `try_bucket` lets the engine read one, and raises ModelError
        when it cannot."""
        if self._settled:
            return
        buckets = DeviceBuckets(self._bucket_bytes, self._device, num_segments=1)
        try:
            try_bucket(buckets.write([("trial", torch.arange(64, dtype=torch.uint8))]))
        except (ModelError, Refused) as error:
            self._give_up(error)
        else:
            self._is_direct = True
        finally:
            buckets.close()
        self._settled = True

    def __call__(self, weights: Iterable[Named]) -> Iterator[Description]:
        """A description of each bucket, which holds until the next but one is asked for. The device's memory is given back at
        the end."""
        buckets = DeviceBuckets(self._bucket_bytes, self._device)
        try:
            for number, some in enumerate(bucketed(weights, self._bucket_bytes)):
                yield self._written(buckets, number, some)
        finally:
            buckets.close()

    def _written(self, buckets: DeviceBuckets, number: int, some: Sequence[Named]) -> Description:
        on_host = self._place(number, some) if self._keeps or not self._is_direct else None
        if self._is_direct:
            try:
                on_device = buckets.write(some)
            except Refused as error:
                self._give_up(error)
            else:
                return on_device if on_host is None else {**on_host, "device": on_device["device"]}
        return on_host if on_host is not None else self._place(number, some)

    def _give_up(self, error: Exception) -> None:
        self._is_direct = False
        log.warning(
            "New weights go to the rollout engine by way of the host's memory, which takes longer: it cannot be handed "
            "memory of %s (%s).",
            self._device,
            str(error).rstrip("."),
        )


def _opened(place: dict[str, Any]) -> torch.Tensor:
    device = cuda_ipc.device_with(place["uuid"])
    try:
        return cuda_ipc.open_handle(base64.b64decode(place["handle"]), place["num_bytes"], device)
    except Refused as error:
        raise ModelError(
            f"Bucket {place['number']} of the new weights is in memory of GPU {place['uuid']}, which the engine on {device} "
            f"cannot open: {error}. Let both processes use the same GPU, in the same container."
        ) from error


def _numbers(memory: torch.Tensor, first: int, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    """A stretch of `memory` as [numbers], in place."""
    return memory[first : first + num_bytes].view(dtype)


def _number_in(memory: torch.Tensor) -> torch.Tensor:
    """[1]: the number of the bucket that lies there."""
    return _numbers(memory, 0, 8, torch.int64)


def _check_number(memory: torch.Tensor, number: int) -> None:
    if int(_number_in(memory)) != number:
        raise written_over(number)


def _wait(memory: torch.Tensor) -> None:
    """Until all that was begun with it is done."""
    if memory.is_cuda:
        torch.cuda.synchronize(memory.device)
