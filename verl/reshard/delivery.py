"""New weights on their way to engines with memory of their own, bucket by bucket, by all ranks of a run together.

    gather             the ranks that train have the tensors of a bucket
    between hosts      one broadcast to the first rank of each host without them       NCCL between GPUs, else gloo
    between devices    in a host, a broadcast to the other ranks that pass them on     NCCL
    to the engine      each rank's bucket for the worker on its GPU                    CUDA IPC
                       or one bucket of the host, which all its engines read           shared memory

So each byte crosses a link once. A bucket has one layout: an engine opens the memory that a broadcast has filled. While the
engines read a bucket, the next one travels.

Before an engine reads a bucket, all ranks have it and have sent its places (on gloo). They meet again before the next is
gathered: a rank that waits for a gather in NCCL would hold the GPU that the engine's worker copies on (TRL issue 7103).

A lost engine reads the newest update again, from one copy in the memory of its host.

With `delta`, what goes to another host is the change since the last update (verl.reshard.delta). Both ends compare and patch
by the copy in the memory of their host. After an update that did not end, the next one travels whole.
"""

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from verl.errors import ModelError
from verl.parallel.collectives import Collectives
from verl.parallel.serialize import from_bytes, to_bytes
from verl.parallel.traffic import TRAFFIC
from verl.reshard.delta import apply, changes
from verl.reshard.device_memory import DeviceBuckets, on_devices
from verl.reshard.host_memory import hosts_of
from verl.reshard.route import Route
from verl.reshard.shared_memory import (
    Buckets,
    Description,
    Named,
    SharedBuckets,
    bucketed,
    lay_out,
    read_bucket,
    read_shared_bucket,
    synchronize,
    tensor_bytes,
    views,
)

log = logging.getLogger(__name__)

# larger buckets are no faster: on a GPU each has calls of the engine; without one a bucket travels while another is verified
_MAX_BUCKET_BYTES = {True: 256 << 20, False: 64 << 20}
_TRIAL: Named = ("trial", torch.arange(64, dtype=torch.uint8))
TryBucket = Callable[[Description], None]


class _Bucket(NamedTuple):
    """`tensors` on the ranks that have them. `description` and `memory` (uint8, from the head on) of the bucket that they lie
    in on this rank, if they do. `patch`: what travels to other hosts in place of the tensors."""

    tensors: Sequence[Named] | None = None
    description: Description | None = None
    memory: torch.Tensor | None = None
    patch: torch.Tensor | None = None


@dataclass
class Delivery:
    """Every rank of a run constructs it with the same `trains` (ranks that gather weights), `replicas` (the ranks of each
    engine; the first one talks to it) and settings, and calls each method at the same time. `comm` is None in a run of one
    process.

    `devices` are the GPUs that this rank writes buckets for: its own, and in a run of one process those of further workers.
    With `keeps` an update stays in the memory of each host. With `delta` it stays in the memory of each host that sends to
    another or receives, and only changes travel; set to False by `connect` if the weights reach no other host. `on_device`:
    engines may open memory of GPUs; set to False by a `probe` that fails.
    """

    comm: Collectives | None
    device: torch.device
    trains: Sequence[int]
    replicas: Sequence[Sequence[int]]
    dtype: torch.dtype
    bucket_bytes: int
    keeps: bool = False
    delta: bool = False
    devices: Sequence[torch.device] = ()
    timeout_s: float | None = None
    on_device: bool | None = None
    num_received_bytes: int = field(default=0, init=False)  # over links, of the newest update
    num_copied_bytes: int = field(default=0, init=False)  # into buckets
    num_other_bytes: int = field(
        default=0, init=False
    )  # on the first rank that takes weights: copied by ranks that take none

    def __post_init__(self) -> None:
        self.rank = 0 if self.comm is None else self.comm.rank
        self.takes = tuple(itertools.chain.from_iterable(self.replicas))
        self.on_device = self.device.type == "cuda" if self.on_device is None else self.on_device
        self.bucket_bytes = min(self.bucket_bytes, _MAX_BUCKET_BYTES[self.device.type == "cuda"])
        self._on_host = SharedBuckets(self.bucket_bytes, keeps=self.keeps)
        devices = self.devices or (self.device,)
        on_gpu = self.on_device or self.device.type == "cuda"
        self._on_devices = [DeviceBuckets(self.bucket_bytes, device) for device in devices] if on_gpu else []
        self._travelling: Buckets = self._on_devices[0] if self._on_devices else self._on_host
        self._is_probed = not self.on_device
        self._layouts: list[list[list[Any]]] = []  # of the buckets of this update
        self._last_layouts: list[list[list[Any]]] = []
        self._is_complete = self._patches = False  # the last update; whether changes travel in this one
        self._copy = torch.empty(0, dtype=torch.uint8)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self.route = Route.of(self.trains, self.takes, dict.fromkeys((*self.trains, *self.takes), 0), by_device=False)

    def connect(self) -> None:
        """Find out which ranks share a host, and make the groups of the broadcasts; all ranks together."""
        if self.comm is None:
            self.delta = False
            return
        hosts, by_device = hosts_of(self.comm), self.device.type == "cuda"
        self.route = Route.of(self.trains, self.takes, hosts, by_device=by_device)
        self.delta &= len(self.route.link) > 1
        self._on_host.keeps |= self.delta
        timeout = None if self.timeout_s is None else timedelta(seconds=self.timeout_s)
        for ranks in self.route.groups:
            self._groups[ranks] = dist.new_group(list(ranks), timeout=timeout)

    def describe(self) -> str:
        """The way of the weights, for the header of a run."""
        library = "NCCL" if self.device.type == "cuda" else "gloo"
        links = [f"{library} to {count(len(self.route.link) - 1, 'host')}"] if len(self.route.link) > 1 else []
        links += ["only changes"] if self.delta else []
        links += ["NCCL between devices"] if self.route.nodes else []
        links += ["CUDA IPC" if self.on_device else "shared memory"]
        return ", ".join(links) + (" (one copy in the memory of each host)" if self.keeps else "")

    def trial(self) -> Description:
        """A bucket of one tensor in memory of the host, valid until the next one."""
        self._trial = SharedBuckets(_TRIAL[1].nbytes)
        return self._trial.write([_TRIAL])

    def probe(self, try_bucket: TryBucket | None) -> None:
        """Find out, once, whether the engines can open buckets in memory of their GPUs. `try_bucket` makes the engine of this
        rank read one, and raises ModelError when it cannot; None on a rank without an engine."""
        if self._is_probed:
            return
        trial, refused = self._exchanged(0, _Bucket([_TRIAL])), ""
        if self.on_device and try_bucket is not None:
            try:
                try_bucket(trial)
            except ModelError as error:
                refused = str(error)
        self._falls_back([row.decode() for row in self._gather(refused.encode())])
        self._is_probed = True

    def __call__(self, weights: Iterable[Named]) -> Iterator[Description]:
        """Send `weights`, tensors by name (nothing on a rank that does not train): a description of each bucket, valid until
        the next one is requested, for the engine of this rank. A rank without one exhausts the iterator."""
        for number, bucket in self._update(weights):
            yield self._exchanged(number, bucket)

    def tensors(self, weights: Iterable[Named]) -> Iterator[Named]:
        """As a call, with the tensors themselves on the ranks that take the weights."""
        if set(self.takes) <= set(self.trains):
            yield from weights
            return
        for number, bucket in self._update(weights):
            description = bucket.description or {} if self._on_devices else self._exchanged(number, bucket)
            if self.rank in self.trains and self.rank in self.takes:
                yield from bucket.tensors or ()
            elif self.rank in self.takes:
                read = (
                    read_shared_bucket(description) if bucket.memory is None else _arrived(bucket.memory, description)
                )
                yield from ((name, tensor.clone()) for name, tensor in read)

    def _update(self, weights: Iterable[Named]) -> Iterator[tuple[int, _Bucket]]:
        """The buckets of an update, numbered, as they have arrived on this rank."""
        self.num_received_bytes = self.num_copied_bytes = 0
        self._on_host.begin()
        # a rank whose last update was cut off needs the whole
        self._patches = self.delta and self.comm is not None and not self.comm.any(not self._is_complete)
        self._is_complete, self._last_layouts, self._layouts = False, self._layouts, []
        try:
            for number, bucket in enumerate(self._carried(weights)):
                yield number, bucket
                if self.comm is not None:
                    self.comm.any(False)  # the engines have read it
            self._is_complete = True
        finally:
            for buckets in self._on_devices:
                buckets.close()

    def _carried(self, weights: Iterable[Named]) -> Iterator[_Bucket]:
        """The buckets of an update as they have arrived on this rank."""
        cast = ((name, tensor.detach().to(self.dtype)) for name, tensor in weights)
        gathered = bucketed(cast, self.bucket_bytes)
        if self.comm is None or len(self.trains) == self.comm.world_size:
            yield from map(_Bucket, gathered)
            return
        flight: tuple[_Bucket, list[dist.Work]] | None = None
        try:
            for number in itertools.count():
                landing = flight
                flight = self._start(number, next(gathered, None) if self.rank in self.trains else None)
                if landing is not None:
                    yield self._landed(*landing)
                if flight is None:
                    return
        finally:
            for work in () if flight is None else flight[1]:
                work.wait()  # it writes into memory that may be freed now

    def _start(self, number: int, tensors: Sequence[Named] | None) -> tuple[_Bucket, list[dist.Work]] | None:
        """Announce the next bucket and send it; None after the last one."""
        assert self.comm is not None
        bucket, source, groups = _Bucket(tensors), self.route.source, self.route.groups
        if tensors is not None and any(self.rank == group[0] for group in groups):
            bucket = self._written(number, tensors)
        announced = None
        if tensors is not None and self.rank == source:
            patch_bytes = None if bucket.patch is None else bucket.patch.nbytes
            announced = (bucket.description or {}).get("entries", []), patch_bytes
        announced = from_bytes(self.comm.broadcast(to_bytes(announced) if self.rank == source else None, source))
        if announced is None:
            return None
        entries, patch_bytes = announced
        if tensors is None and any(self.rank in group for group in groups):
            description, memory = self._travelling.room(entries)
            bucket = _Bucket(list(views(memory, entries)), description, memory)
            if self.rank in self.route.link and patch_bytes is not None:
                content = tensor_bytes(memory, entries)
                if self._on_devices:  # else it lies there
                    content.copy_(self._last_content(number, entries))
                bucket = bucket._replace(patch=content.new_empty(patch_bytes))
        works = self._broadcast(self.route.link, bucket, bucket.patch)
        for group in self.route.nodes:
            works += self._broadcast(group, bucket) if group not in self.route.relays else []
        return bucket, works

    def _written(self, number: int, tensors: Sequence[Named]) -> _Bucket:
        """The bucket of `tensors`, which this rank sends, with its changes if the receivers have the last one."""
        self.num_copied_bytes += sum(tensor.nbytes for _, tensor in tensors)
        layout = lay_out(tensors, self.bucket_bytes)
        self._layouts.append(layout)
        before = patch = None
        if self._patches and self.rank == self.route.source and self._last_layouts[number : number + 1] == [layout]:
            content = self._last_content(number, layout)
            before = content if self._on_devices else self._copied(content)  # the bucket is written over it
        description, memory = self._travelling.laid_out(tensors)
        if before is not None:
            content = tensor_bytes(memory, layout)
            patch = changes(before.to(content.device), content)
        return _Bucket(tensors, description, memory, patch)

    def _copied(self, content: torch.Tensor) -> torch.Tensor:
        """A copy until the next call; new memory would take four times as long as the copy."""
        if self._copy.nbytes < content.nbytes:
            self._copy = torch.empty_like(content)
        return self._copy[: content.nbytes].copy_(content)

    def _last_content(self, number: int, entries: Sequence[list[Any]]) -> torch.Tensor:
        """The bytes of a bucket of the last update, in memory of this host."""
        return tensor_bytes(self._on_host.memory_of(number), entries)

    def _landed(self, bucket: _Bucket, works: list[dist.Work]) -> _Bucket:
        """The bucket when it has arrived here, and on the ranks of this host that it is broadcast to."""
        for work in works:
            work.wait()
        if bucket.patch is not None and self.rank != self.route.source:
            assert bucket.description is not None
            assert bucket.memory is not None
            apply(bucket.patch, tensor_bytes(bucket.memory, bucket.description["entries"]))
        for group in self.route.relays:
            for work in self._broadcast(group, bucket):
                work.wait()
        if bucket.memory is not None:
            synchronize(bucket.memory)
        return bucket

    def _broadcast(self, group: tuple[int, ...], bucket: _Bucket, patch: torch.Tensor | None = None) -> list[dist.Work]:
        """Send or receive `patch`, or the memory of the bucket, in `group`."""
        if self.rank not in group or len(group) == 1:
            return []
        assert bucket.description is not None
        assert bucket.memory is not None
        content = tensor_bytes(bucket.memory, bucket.description["entries"]) if patch is None else patch
        sends = self.rank == group[0]
        self.num_received_bytes += 0 if sends else content.nbytes
        with TRAFFIC.exchanging(content.nbytes if sends else 0):
            work = dist.broadcast(content, group[0], group=self._groups[group], async_op=True)
        return [] if work is None else [work]

    def _laid_out(self, buckets: Buckets, tensors: Sequence[Named]) -> Description:
        self.num_copied_bytes += sum(tensor.nbytes for _, tensor in tensors)
        return buckets.write(tensors)

    def _exchanged(self, number: int, bucket: _Bucket) -> Description:
        """The description of the bucket for the engine of this rank, once all ranks have it."""
        while True:
            row = {**self._placed(number, bucket), "copied": self.num_copied_bytes}
            rows = [from_bytes(row) for row in self._gather(to_bytes(row))]
            if self.rank == self.takes[0]:
                self.num_other_bytes = sum(row["copied"] for rank, row in enumerate(rows) if rank not in self.takes)
            if not self._falls_back([row["refused"] for row in rows]):
                return self._described(number, rows)

    def _placed(self, number: int, bucket: _Bucket) -> Description:
        """The places of the bucket on this rank: the descriptions on its GPUs, and on the host if this rank writes there."""
        row: Description = {"refused": "", "devices": [], "host": None}
        tensors = bucket.tensors or ()
        if self.on_device and self.rank in self.takes:
            first, *further = self._on_devices
            row["devices"] = [bucket.description or self._laid_out(first, tensors)]
            row["devices"] += [self._laid_out(device, tensors) for device in further]
            row["refused"] = next((device.refused for device in self._on_devices if device.refused), "")
        compares = self.delta and bool(self._on_devices) and self.rank in self.route.link
        if compares or any(self._writer(number, rank) == self.rank for rank in self.takes):
            arrived = None if self._on_devices else bucket.description
            row["host"] = arrived or self._laid_out(self._on_host, tensors)
        return row

    def _writer(self, number: int, rank: int) -> int | None:
        """The rank that writes the bucket to memory of the host for the engine of `rank`; the ranks of a host take turns at the
        copies that are kept."""
        root = self.route.roots[rank]
        if not self.on_device or self.delta:
            return root
        alike = [other for other in self.takes if self.route.roots[other] == root]
        return alike[number % len(alike)] if self.keeps else None

    def _described(self, number: int, rows: Sequence[Description]) -> Description:
        if self.rank not in self.takes:
            return {}
        writer = self._writer(number, self.rank)
        on_host: Description | None = None if writer is None else rows[writer]["host"]
        if not self.on_device:
            return on_host or {}
        replica = next(ranks for ranks in self.replicas if self.rank in ranks)
        parts = [part for rank in replica for part in rows[rank]["devices"]]
        return on_devices(on_host or rows[self.rank]["devices"][0], *parts)

    def _falls_back(self, refusals: Sequence[str]) -> bool:
        """Use memory of the hosts from now on, on all ranks, if one could not use memory of its GPU."""
        if not self.on_device or not any(refusals):
            return False
        self.on_device = False
        if refusals[self.rank]:
            log.warning(
                "New weights reach the rollout engine through host memory, which is slower: it cannot open memory of %s (%s).",
                self.device,
                refusals[self.rank].rstrip("."),
            )
        return True

    def _gather(self, row: bytes) -> list[bytes]:
        return [row] if self.comm is None else self.comm.all_gather(row)


def _arrived(memory: torch.Tensor, description: Description) -> Iterator[Named]:
    entries = description["entries"]
    return read_bucket(memory, description["number"], entries, [entry[5] for entry in entries])


def count(number: int, noun: str) -> str:
    """`1 host`, `2 hosts`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
