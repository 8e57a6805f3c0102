"""Carrying out a plan between processes: point to point, in buckets of bounded size, and proved.

    transport = PeerToPeer(tensors, training, rollout, plan, dtype=torch.bfloat16, device=device, staging_bytes=64 << 20)
    transport.share_memory(comm)  # optional
    transport(held, wanted)       # every rank of the group, at the same time

Senders cast before they send. While one bucket is under way, the next one is cast and the last one unpacked. Between ranks
that share memory a bucket lies there, and a message of a few bytes says where; else the bucket is the message.

Proof: each sender says a digest of (name, place, dtype, bytes) of what it sent, and the receiver computes the same from
what its engine holds after everything has been written. A bucket that was lost, tensors that were swapped, or a write that
went over another are so found, by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from verl.errors import ModelError
from verl.parallel.collectives import Collectives
from verl.parallel.traffic import TRAFFIC
from verl.reshard.buckets import buckets
from verl.reshard.digest import DIGEST_BYTES, copy_with_digest, digest
from verl.reshard.host_memory import HostMemory, aligned
from verl.reshard.layout import Layout, Slot, Tensor
from verl.reshard.parts import Part, numel
from verl.reshard.plan import Move, Plan

_NOTE_BYTES = 8  # of a message that says where a bucket lies, and of one that says it has been read
Tensors = Mapping[str, torch.Tensor]


def source_views(engine: Tensors, slots: Mapping[str, Slot]) -> dict[str, torch.Tensor]:
    """Name of a tensor of the model -> its place in the engine's tensors, which may be fused (RolloutLayout.slots)."""
    return {name: engine[slot.name][slot.first : slot.stop] for name, slot in slots.items()}


class _Parcel(NamedTuple):
    """What comes from one peer: the numbers, or with `is_note` a message that says where they lie."""

    peer: int
    moves: list[Move]
    message: torch.Tensor
    is_note: bool


class _Flight(NamedTuple):
    """A bucket that is under way."""

    number: int
    works: list[dist.Work]
    parcels: list[_Parcel]
    num_bytes: int


class PeerToPeer:
    """Sends and receives of one rank. Made by every rank of `group` with the same arguments.

    `dtype` is the rollout's; every Tensor.itemsize is its size. `staging_bytes` bounds the buffers on this rank, of which
    `peak_staging_bytes` says how much was used. `num_sent_bytes` counts what has left this rank, in messages or through
    memory. Waits end with the timeout of `group` (default: the whole run's).
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        source: Layout,
        target: Layout,
        plan: Plan,
        *,
        dtype: torch.dtype,
        device: torch.device,
        staging_bytes: int,
        group: dist.ProcessGroup | None = None,
    ):
        assert all(tensor.itemsize == dtype.itemsize for tensor in tensors)
        assert staging_bytes >= 2 * dtype.itemsize
        self.rank, self.group, self.dtype, self.device = dist.get_rank(), group, dtype, device
        self.peak_staging_bytes = self.num_sent_bytes = self._staged = 0
        self._held = {t.name: part for t in tensors if (part := source.part(t, self.rank)) is not None}
        self._wanted = {t.name: part for t in tensors if (part := target.part(t, self.rank)) is not None}
        self._kept = plan.kept(self.rank)
        self._plan, self._most_bytes = plan, staging_bytes // 2  # two buckets are in memory at a time
        self._arrange(counts_received=True)
        self._num_planned_bytes = plan.sent_bytes.get(self.rank, 0)
        self._memory: HostMemory | None = None
        self._receipts: list[list[dist.Work]] = []  # of each bucket of an update: its readers are done
        self._sends: list[dist.Work] = []  # receipts for others
        self._kept_digests: dict[Move, bytes | None] = {}  # None: what trains and what generates are the same memory
        self._proved: dict[Move, bytes] = {}  # what came and was kept in the last update

    def share_memory(self, comm: Collectives) -> None:
        """From now on ranks of one host give each other tensors through memory, where they can. Called by every rank of
        `comm`, which are those of `group`, where tensors are on the CPU. Where all can, what comes needs no buffer, and
        buckets are larger for it."""
        assert self.device.type == "cpu"
        half_bytes = min(self._most_bytes, self._num_planned_bytes)
        gaps = aligned(1) * comm.world_size if half_bytes else 0
        self._memory = HostMemory(comm, half_bytes + gaps)
        sources = {move.source for move in self._plan.receives(self.rank)}
        if all(map(bool, comm.all_gather(b"yes" if sources <= self._memory.inboxes.keys() else b""))):
            self._arrange(counts_received=False)

    def _arrange(self, *, counts_received: bool) -> None:
        everything = buckets(self._plan.moves, self._most_bytes, counts_received=counts_received)
        self._num_buckets = len(everything)  # of all ranks; this one takes part in:
        self._buckets = {
            number: bucket
            for number, moves in enumerate(everything)
            if any(bucket := (_by_peer(moves, "source", self.rank), _by_peer(moves, "destination", self.rank)))
        }

    def __call__(self, held: Tensors, wanted: Tensors) -> None:
        """Fill `wanted` (this rank's parts in the target layout, of any dtype) out of what all ranks have in `held` (its
        parts in the source layout). They share memory only where both are the same elements.

        Raises ModelError when a tensor is missing, has another shape than its part, or does not hold what was sent; on the
        rank where that is so, and the caller tells the others.
        """
        self.check(held, wanted)
        self._receipts, self._sends, self._kept_digests = [], [], {}
        self._staged = self._memory.num_bytes if self._memory is not None else 0
        digests: dict[int, list[bytes]] = {}  # destination -> of each move, in order
        with torch.no_grad(), TRAFFIC.exchanging(self._num_planned_bytes):
            flight: _Flight | None = None
            for number in self._buckets:
                following = self._start(number, held, digests)
                if flight is not None:
                    self._finish(flight, wanted)
                flight = following
            self._keep(held, wanted)
            if flight is not None:
                self._finish(flight, wanted)
            for work in (*(work for works in self._receipts for work in works), *self._sends):
                work.wait()
            self._prove(wanted, digests)

    def check(self, held: Tensors, wanted: Tensors) -> None:
        """Raise ModelError when a tensor is missing or has another shape than its part."""
        self._check(held, self._held, "hold")
        self._check(wanted, self._wanted, "fill")

    def _start(self, number: int, held: Tensors, digests: dict[int, list[bytes]]) -> _Flight:
        """Pack and send a bucket, and ask for what others send."""
        incoming, outgoing = self._buckets[number]
        ops, parcels, receipts = [], [], []
        for peer, moves in incoming.items():
            is_note = self._memory is not None and peer in self._memory.inboxes
            message = _note() if is_note else self._buffer(moves)
            parcels.append(_Parcel(peer, moves, message, is_note))
            ops.append(dist.P2POp(dist.irecv, message, peer, self.group, number))
        place = self._free_half()
        messages = []
        for peer, moves in outgoing.items():
            if self._memory is not None and peer in self._memory.readers:
                buffer, message = self._memory.room(place, _count(moves), self.dtype), _note(place)
                place += aligned(buffer.nbytes)
                receipts.append(dist.P2POp(dist.irecv, _note(), peer, self.group, self._receipt_tag(number)))
            else:
                buffer = message = self._buffer(moves)
                messages.append(buffer)
            self._pack(moves, buffer, held, digests.setdefault(peer, []))
            ops.append(dist.P2POp(dist.isend, message, peer, self.group, number))
        num_bytes = sum(m.nbytes for m in messages) + sum(p.message.nbytes for p in parcels if not p.is_note)
        self._staged += num_bytes
        self.peak_staging_bytes = max(self.peak_staging_bytes, self._staged)
        works = dist.batch_isend_irecv(ops)
        self._receipts.append(dist.batch_isend_irecv(receipts) if receipts else [])
        return _Flight(number, works, parcels, num_bytes)

    def _pack(self, moves: Sequence[Move], buffer: torch.Tensor, held: Tensors, digests: list[bytes]) -> None:
        for move, place in _slices(moves, buffer):
            digests.append(copy_with_digest(_label(move), place, self._at(held, move, is_source=True)))
        self.num_sent_bytes += buffer.nbytes

    def _free_half(self) -> int:
        """Where in this rank's memory the next bucket may lie, when the one before the last has been read."""
        if self._memory is None:
            return 0
        count = len(self._receipts)
        if count >= 2:
            for work in self._receipts[count - 2]:
                work.wait()
            self._receipts[count - 2] = []
        return count % 2 * self._memory.half_bytes

    def _finish(self, flight: _Flight, wanted: Tensors) -> None:
        """Put what has come into its place, and say so."""
        for work in flight.works:
            work.wait()
        receipts = []
        for parcel in flight.parcels:
            self._unpack(parcel, wanted)
            if parcel.is_note:
                tag = self._receipt_tag(flight.number)
                receipts.append(dist.P2POp(dist.isend, parcel.message, parcel.peer, self.group, tag))
        self._sends += dist.batch_isend_irecv(receipts) if receipts else []
        self._staged -= flight.num_bytes

    def _unpack(self, parcel: _Parcel, wanted: Tensors) -> None:
        buffer = parcel.message
        if parcel.is_note:
            assert self._memory is not None
            place = int(parcel.message.view(torch.int64))
            buffer = self._memory.read(parcel.peer, place, _count(parcel.moves), self.dtype)
        for move, numbers in _slices(parcel.moves, buffer):
            self._at(wanted, move, is_source=False).copy_(numbers)

    def _receipt_tag(self, number: int) -> int:
        return self._num_buckets + 1 + number

    def _keep(self, held: Tensors, wanted: Tensors) -> None:
        for move in self._kept:
            have, need = self._at(held, move, is_source=True), self._at(wanted, move, is_source=False)
            self._kept_digests[move] = None if _is_same_memory(have, need) else self._copy_kept(move, have, need)

    def _copy_kept(self, move: Move, have: torch.Tensor, need: torch.Tensor) -> bytes:
        """Through the format of what travels: two copies of one number, kept and sent, are alike."""
        if need.dtype != self.dtype:
            have = have.to(self.dtype)
            need.copy_(have)
            return digest(_label(move), have)
        return copy_with_digest(_label(move), need, have)

    def _prove(self, wanted: Tensors, sent: Mapping[int, Sequence[bytes]]) -> None:
        """Compare what the engine holds with what the senders say they sent, and with what was kept."""
        received = [move for incoming, _ in self._buckets.values() for moves in incoming.values() for move in moves]
        self._proved = {}
        # first of all, as a rank that finds a fault leaves, and others need its digests
        said = self._exchange(sent, Counter(move.source for move in received))
        for move in received:
            self._proved[move] = next(said[move.source])
        for move in self._kept:
            if move not in self._kept_digests:
                raise _wrong(move)
            if (kept := self._kept_digests[move]) is not None:
                self._proved[move] = kept
        self.check_held(wanted)

    def check_held(self, wanted: Tensors) -> None:
        """Raise ModelError unless `wanted` holds what the last update has brought."""
        self._check(wanted, self._wanted, "fill")
        for move, said in self._proved.items():
            if self._digest_of(move, wanted) != said:
                raise _wrong(move)

    def _exchange(self, sent: Mapping[int, Sequence[bytes]], counts: Mapping[int, int]) -> dict[int, Iterator[bytes]]:
        """Send destination -> digests; returns source -> its digests, in the order of the moves, as many as `counts` says."""
        number = self._num_buckets
        said = {
            peer: torch.empty(n * DIGEST_BYTES, dtype=torch.uint8, device=self.device) for peer, n in counts.items()
        }
        ops = [dist.P2POp(dist.irecv, claim, peer, self.group, number) for peer, claim in sorted(said.items())]
        for peer, digests in sorted(sent.items()):
            claim = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8).to(self.device)
            ops.append(dist.P2POp(dist.isend, claim, peer, self.group, number))
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()
        return {
            peer: (bytes(row.tolist()) for row in claim.cpu().view(-1, DIGEST_BYTES)) for peer, claim in said.items()
        }

    def _digest_of(self, move: Move, wanted: Tensors) -> bytes:
        return digest(_label(move), self._at(wanted, move, is_source=False).to(self.dtype))

    def _at(self, tensors: Tensors, move: Move, *, is_source: bool) -> torch.Tensor:
        """The region of a move in a local tensor (a view)."""
        part = (self._held if is_source else self._wanted)[move.tensor]
        return tensors[move.tensor][tuple(slice(*span) for span in part.locate(move.box))]

    def _buffer(self, moves: Sequence[Move]) -> torch.Tensor:
        return torch.empty(_count(moves), dtype=self.dtype, device=self.device)

    def _check(self, tensors: Tensors, parts: Mapping[str, Part], what: str) -> None:
        for name, part in parts.items():
            if name not in tensors:
                raise ModelError(
                    f"Rank {self.rank} should {what} {list(part.shape)} of {name}, which is not there; the layouts do not "
                    "describe this model."
                )
            if tuple(tensors[name].shape) != part.shape:
                raise ModelError(
                    f"Rank {self.rank} should {what} {list(part.shape)} of {name}, but its tensor is "
                    f"{list(tensors[name].shape)}; the layouts do not describe this model."
                )


def _by_peer(bucket: Sequence[Move], peer_end: str, rank: int) -> dict[int, list[Move]]:
    """Peer -> the moves between it and `rank`, with the peer at one end; peers ascend."""
    other_end = "destination" if peer_end == "source" else "source"
    found: dict[int, list[Move]] = {}
    for move in bucket:
        if getattr(move, other_end) == rank:
            found.setdefault(getattr(move, peer_end), []).append(move)
    return dict(sorted(found.items()))


def _count(moves: Sequence[Move]) -> int:
    return sum(numel(move.box) for move in moves)


def _note(number: int = 0) -> torch.Tensor:
    return torch.tensor([number]).view(torch.uint8)


def _label(move: Move) -> str:
    return f"{move.tensor} {move.box}"


def _slices(moves: Sequence[Move], buffer: torch.Tensor) -> list[tuple[Move, torch.Tensor]]:
    """Each move with its stretch of the buffer, in the shape of its box."""
    shapes = [tuple(stop - first for first, stop in move.box) for move in moves]
    stretches = buffer.split([numel(move.box) for move in moves])
    return [(move, s.view(shape)) for move, s, shape in zip(moves, stretches, shapes, strict=True)]


def _is_same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.stride() == b.stride()


def _wrong(move: Move) -> ModelError:
    whence = "what it has itself" if move.is_kept else f"what rank {move.source} sent"
    return ModelError(
        f"After the update of weights, rank {move.destination} does not hold {whence} of {move.tensor} at {list(move.box)}. "
        "These weights must not be used: update again, or rebuild the rollout engine."
    )
