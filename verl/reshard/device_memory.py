"""New weights for an engine in another process through GPU memory: buckets that it opens by a handle, without the host.

    buckets = DeviceBuckets(256 << 20, device)           # the turns and digests of verl.reshard.shared_memory.Buckets
    for some in bucketed(weights, 256 << 20):
        engine.update(on_devices(buckets.write(some)))   # the engine replies after reading

    for name, tensor in read(description):               # in the process of the engine; reads host buckets as well
        parameters[name].copy_(tensor)

Whether another process can open such memory depends on the machine: containers and GPU partitions (MIG) prevent it. Memory of
another GPU would take a context there for good, about half a GB. So a bucket lies on each GPU with a worker of the engine,
and a worker opens only the memory of its GPU (verl.reshard.delivery).
"""

import base64
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from verl.errors import ModelError
from verl.reshard import cuda_ipc, shared_memory
from verl.reshard.cuda_ipc import Refused
from verl.reshard.shared_memory import Buckets, Description, Named, SharedBlock, read_bucket

_OWN: weakref.WeakValueDictionary[str, torch.Tensor] = weakref.WeakValueDictionary()  # a process cannot open its own


@dataclass
class _Block:
    """GPU memory; `place` has the facts for opening it in another process, nothing if that is impossible."""

    values: torch.Tensor
    place: Description = field(default_factory=dict)

    def close(self) -> None:
        """Nothing: the memory is freed with its last tensor."""


class DeviceBuckets(Buckets):
    """Buckets in GPU memory; see Buckets for their life. `refused` says why no other process can open them, "" if it can."""

    def __init__(self, bucket_bytes: int, device: torch.device):
        super().__init__(bucket_bytes)
        self.device, self.refused = device, ""

    def allocate(self, num_bytes: int) -> SharedBlock:
        """A new block, of torch's memory if the driver refuses."""
        try:
            values, handle = cuda_ipc.allocate(num_bytes, self.device)
        except Refused as error:
            self.refused = str(error)
            return _Block(torch.empty(num_bytes, dtype=torch.uint8, device=self.device))
        token = os.urandom(16).hex()
        _OWN[token] = values
        encoded = base64.b64encode(handle).decode()
        return _Block(
            values, {"token": token, "uuid": cuda_ipc.uuid_of(self.device), "handle": encoded, "num_bytes": num_bytes}
        )


def on_devices(bucket: Description, *further: Description) -> Description:
    """The description of a bucket that lies in memory of several GPUs, by its descriptions on each. With the description of a
    copy on the host as `bucket`, a reader without "devices" reads that."""
    return {**bucket, "devices": [_placed(other) for other in further or (bucket,)]}


def _placed(bucket: Description) -> Description:
    place = {name: bucket[name] for name in ("token", "uuid", "handle", "num_bytes", "number")}
    return {**place, "digests": [entry[5] for entry in bucket["entries"]]}


def read_device_bucket(description: Description) -> Iterator[Named]:
    """The tensors of a bucket, in order, as views of memory of this process's GPU, or of the host's if the description has no
    "devices". Copy each on the current stream before the reply to the writer.

    Raises ModelError when the memory cannot be opened, the bucket was overwritten, or a tensor does not match its digest.
    """
    places: Sequence[dict[str, Any]] | None = description.get("devices")
    if places is None:
        return shared_memory.read_shared_bucket(description)
    device = cuda_ipc.current_device()
    uuid = cuda_ipc.uuid_of(device)
    place = next((place for place in places if place["uuid"] == uuid), places[0])
    if place["uuid"] != uuid and len(places) > 1:
        raise ModelError(
            f"Bucket {place['number']} of the new weights is in memory of {len(places)} GPUs, and not of {uuid} ({device}), "
            "where the engine has a worker. Let the run and the engine see the same GPUs (CUDA_VISIBLE_DEVICES)."
        )
    memory = _OWN.get(place["token"])
    if memory is None:
        memory = _opened(place, device)
    return read_bucket(memory, place["number"], description["entries"], place["digests"])


def _opened(place: dict[str, Any], device: torch.device) -> torch.Tensor:
    try:
        return cuda_ipc.open_handle(base64.b64decode(place["handle"]), place["num_bytes"], device)
    except Refused as error:
        raise ModelError(
            f"Bucket {place['number']} of the new weights is in memory of GPU {place['uuid']}, which the engine on {device} "
            f"cannot open: {error}. Let both processes use the same GPU, in the same container."
        ) from error
