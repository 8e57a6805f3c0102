"""New weights for an engine in another process through GPU memory: buckets that it opens by a handle, without the host.

    buckets = DeviceBuckets(256 << 20, device)           # the turns and digests of verl.reshard.shared_memory.Buckets
    for some in bucketed(weights, 256 << 20):
        engine.update(buckets.write(some))               # the engine replies after reading

    for name, tensor in read(description):               # in the process of the engine; reads host buckets as well
        parameters[name].copy_(tensor)

Whether another process can open such memory depends on the machine: containers, GPU partitions (MIG) and GPUs without peer
access prevent it. DeviceSender probes it once and falls back to host memory.
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
from verl.reshard.shared_memory import Buckets, Description, Named, bucketed, read_bucket

log = logging.getLogger(__name__)

_MAX_BUCKET_BYTES = 256 << 20  # larger buckets are no faster on a device, and its memory is scarce
_OWN: weakref.WeakValueDictionary[str, torch.Tensor] = weakref.WeakValueDictionary()  # a process cannot open its own


class _DeviceBlock:
    """GPU memory with the facts for opening it in another process."""

    def __init__(self, num_bytes: int, device: torch.device):
        self.values, handle = cuda_ipc.allocate(num_bytes, device)
        token = os.urandom(16).hex()
        encoded = base64.b64encode(handle).decode()
        place = {"token": token, "uuid": cuda_ipc.uuid_of(device), "handle": encoded, "num_bytes": num_bytes}
        self.place: Description = {"device": place}
        _OWN[token] = self.values

    def close(self) -> None:
        """Nothing: the memory is freed with its last tensor."""


class DeviceBuckets(Buckets):
    """Buckets in GPU memory; see Buckets for their life."""

    def __init__(self, bucket_bytes: int, device: torch.device, num_segments: int = 2):
        super().__init__(bucket_bytes, num_segments)
        self.device = device

    def allocate(self, num_bytes: int) -> _DeviceBlock:
        return _DeviceBlock(num_bytes, self.device)

    def write(self, tensors: Sequence[Named]) -> Description:
        """As Buckets.write, with everything that reading needs under "device". Raises cuda_ipc.Refused when the device cannot
        allocate."""
        bucket = super().write(tensors)
        digests = [entry[5] for entry in bucket["entries"]]
        return {**bucket, "device": {**bucket["device"], "number": self._number, "digests": digests}}


def read_device_bucket(description: Description) -> Iterator[Named]:
    """The tensors of a bucket, in order, as views of the device's memory, or of the host's if the description has no
    "device". Copy each on the current stream before the reply to the writer.

    Raises ModelError when the memory cannot be opened, the bucket was overwritten, or a tensor does not match its digest.
    """
    place = description.get("device")
    if place is None:
        return shared_memory.read_shared_bucket(description)
    memory = _OWN.get(place["token"])
    if memory is None:
        memory = _opened(place)
    return read_bucket(memory, place["number"], description["entries"], place["digests"])


class DeviceSender:
    """All weights of an update as described buckets: on `device` if `probe` found that the engine can open it, otherwise on
    the host through `place` (index of the bucket, tensors). With `keeps` they are on both, so that an engine that was lost
    can read them again."""

    def __init__(
        self,
        device: torch.device,
        bucket_bytes: int,
        place: Callable[[int, Sequence[Named]], Description],
        *,
        keeps: bool,
    ):
        self._device, self._place, self._keeps = device, place, keeps
        self._bucket_bytes = min(bucket_bytes, _MAX_BUCKET_BYTES)
        self._is_probed = self._is_direct = False

    def probe(self, try_bucket: Callable[[Description], None]) -> None:
        """Find out, once, whether buckets can go through the device. `try_bucket` makes the engine read one, and raises
        ModelError when it cannot."""
        if self._is_probed:
            return
        buckets = DeviceBuckets(self._bucket_bytes, self._device, num_segments=1)
        try:
            try_bucket(buckets.write([("trial", torch.arange(64, dtype=torch.uint8))]))
        except (ModelError, Refused) as error:
            self._fall_back(error)
        else:
            self._is_direct = True
        finally:
            buckets.close()
        self._is_probed = True

    def __call__(self, weights: Iterable[Named]) -> Iterator[Description]:
        """A description of each bucket, valid until the second one after it is requested. The device's memory is freed at
        the end."""
        buckets = DeviceBuckets(self._bucket_bytes, self._device)
        try:
            for index, some in enumerate(bucketed(weights, self._bucket_bytes)):
                yield self._written(buckets, index, some)
        finally:
            buckets.close()

    def _written(self, buckets: DeviceBuckets, index: int, some: Sequence[Named]) -> Description:
        on_host = self._place(index, some) if self._keeps or not self._is_direct else None
        if self._is_direct:
            try:
                on_device = buckets.write(some)
            except Refused as error:
                self._fall_back(error)
            else:
                return on_device if on_host is None else {**on_host, "device": on_device["device"]}
        return on_host if on_host is not None else self._place(index, some)

    def _fall_back(self, error: Exception) -> None:
        self._is_direct = False
        log.warning(
            "New weights reach the rollout engine through host memory, which is slower: it cannot open memory of %s (%s).",
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
