"""Carrying out a plan between processes: point to point, in buckets of bounded size, and proved.

    transport = PeerToPeer(tensors, training, rollout, plan, dtype=torch.bfloat16, device=device, staging_bytes=64 << 20)
    transport(held, wanted)      # every rank of the group, at the same time

Senders cast before they send. While one bucket is under way, the next one is cast and the last one unpacked.

Proof: each sender says a digest of (name, place, dtype, bytes) of what it sent, and the receiver computes the same from
what its engine holds after everything has been written. A bucket that was lost, tensors that were swapped, or a write that
went over another are so found, by name.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from verl.errors import ModelError
from verl.parallel.traffic import TRAFFIC
from verl.reshard.buckets import buckets
from verl.reshard.layout import Layout, Slot, Tensor
from verl.reshard.parts import Part, numel, pieces
from verl.reshard.plan import Move, Plan

_DIGEST_BYTES = 16
_WORD_BYTES = 8
# of the words of a digest: odd, and the same in all processes
_FACTORS = torch.randint(-(2**61), 2**61, (1 << 15,), generator=torch.Generator().manual_seed(0)) * 2 + 1
Tensors = Mapping[str, torch.Tensor]


def source_views(engine: Tensors, slots: Mapping[str, Slot]) -> dict[str, torch.Tensor]:
    """Name of a tensor of the model -> its place in the engine's tensors, which may be fused (RolloutLayout.slots)."""
    return {name: engine[slot.name][slot.first : slot.stop] for name, slot in slots.items()}


class _Flight(NamedTuple):
    """A bucket that is under way."""

    works: list[dist.Work]
    receives: list[tuple[Move, torch.Tensor]]  # where each will lie, in a buffer
    num_bytes: int


class PeerToPeer:
    """Sends and receives of one rank. Made by every rank of `group` with the same arguments.

    `dtype` is the rollout's; every Tensor.itemsize is its size. `staging_bytes` bounds the buffers on this rank, of which
    `peak_staging_bytes` says how much was used. Waits end with the timeout of `group` (default: the whole run's).
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
        self.peak_staging_bytes = 0
        self._staged = 0
        self._held = {t.name: part for t in tensors if (part := source.part(t, self.rank)) is not None}
        self._wanted = {t.name: part for t in tensors if (part := target.part(t, self.rank)) is not None}
        # two buckets are in memory at a time, or one and a piece of what is kept
        most = staging_bytes // 2
        self._kept = [
            move._replace(box=box) for move in plan.kept(self.rank) for box in pieces(move.box, most // dtype.itemsize)
        ]
        self._buckets = [
            [move for move in bucket if self.rank in (move.source, move.destination)]
            for bucket in buckets(plan.moves, most)
        ]
        self._kept_digests: dict[Move, bytes] = {}
        self._num_sent_bytes = plan.sent_bytes.get(self.rank, 0)

    def __call__(self, held: Tensors, wanted: Tensors) -> None:
        """Fill `wanted` (this rank's parts in the target layout, of any dtype) out of what all ranks have in `held` (its
        parts in the source layout). They share memory only where both are the same elements.

        Raises ModelError when a tensor is missing, has another shape than its part, or does not hold what was sent; on the
        rank where that is so, and the caller tells the others.
        """
        self.check(held, wanted)
        self._kept_digests.clear()
        digests: dict[int, list[bytes]] = {}  # destination -> of each move, in order
        with torch.no_grad(), TRAFFIC.exchanging(self._num_sent_bytes):
            flight: _Flight | None = None
            for number, bucket in enumerate(self._buckets):
                if not bucket:
                    continue
                following = self._start(number, bucket, held, digests)
                if flight is not None:
                    self._finish(flight, wanted)
                flight = following
            self._keep(held, wanted)
            if flight is not None:
                self._finish(flight, wanted)
            self._prove(held, wanted, digests)

    def check(self, held: Tensors, wanted: Tensors) -> None:
        """Raise ModelError when a tensor is missing or has another shape than its part. Nothing is sent."""
        self._check(held, self._held, "hold")
        self._check(wanted, self._wanted, "fill")

    def _start(self, number: int, bucket: Sequence[Move], held: Tensors, digests: dict[int, list[bytes]]) -> _Flight:
        """Cast what goes out into one buffer per peer, and post its send and receives."""
        ops, receives, num_bytes = [], [], 0
        for peer, moves in _by_peer(bucket, "source", self.rank):
            buffer = self._buffer(moves)
            num_bytes += buffer.nbytes
            receives += _slices(moves, buffer)
            ops.append(dist.P2POp(dist.irecv, buffer, peer, self.group, number))
        for peer, moves in _by_peer(bucket, "destination", self.rank):
            buffer = self._buffer(moves)
            num_bytes += buffer.nbytes
            for move, place in _slices(moves, buffer):
                place.copy_(self._at(held, move, is_source=True))
                digests.setdefault(peer, []).append(_digest(move, place))
            ops.append(dist.P2POp(dist.isend, buffer, peer, self.group, number))
        self._staged += num_bytes
        self.peak_staging_bytes = max(self.peak_staging_bytes, self._staged)
        return _Flight(dist.batch_isend_irecv(ops), receives, num_bytes)

    def _finish(self, flight: _Flight, wanted: Tensors) -> None:
        for work in flight.works:
            work.wait()
        for move, place in flight.receives:
            self._at(wanted, move, is_source=False).copy_(place)
        self._staged -= flight.num_bytes

    def _keep(self, held: Tensors, wanted: Tensors) -> None:
        for move in self._kept:
            have, need = self._at(held, move, is_source=True), self._at(wanted, move, is_source=False)
            if not _is_same_memory(have, need):
                cast = have.to(self.dtype)
                need.copy_(cast)
                self._kept_digests[move] = _digest(move, cast)

    def _prove(self, held: Tensors, wanted: Tensors, sent: Mapping[int, Sequence[bytes]]) -> None:
        """Compare what the engine holds with what the senders say they sent, and with what was kept."""
        received = [move for bucket in self._buckets for move in bucket if move.destination == self.rank]
        # first of all, as a rank that finds a fault leaves, and others need its digests
        said = self._exchange(sent, Counter(move.source for move in received))
        for move in received:
            if self._digest_of(move, wanted) != next(said[move.source]):
                raise _wrong(move)
        for move in self._kept:
            have, need = self._at(held, move, is_source=True), self._at(wanted, move, is_source=False)
            if not _is_same_memory(have, need) and self._digest_of(move, wanted) != self._kept_digests.get(move):
                raise _wrong(move)

    def _exchange(self, sent: Mapping[int, Sequence[bytes]], counts: Mapping[int, int]) -> dict[int, Iterator[bytes]]:
        """Send destination -> digests; returns source -> its digests, in the order of the moves, as many as `counts` says."""
        number = len(self._buckets)
        said = {
            peer: torch.empty(n * _DIGEST_BYTES, dtype=torch.uint8, device=self.device) for peer, n in counts.items()
        }
        ops = [dist.P2POp(dist.irecv, claim, peer, self.group, number) for peer, claim in sorted(said.items())]
        for peer, digests in sorted(sent.items()):
            claim = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8).to(self.device)
            ops.append(dist.P2POp(dist.isend, claim, peer, self.group, number))
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()
        return {
            peer: (bytes(row.tolist()) for row in claim.cpu().view(-1, _DIGEST_BYTES)) for peer, claim in said.items()
        }

    def _digest_of(self, move: Move, wanted: Tensors) -> bytes:
        return _digest(move, self._at(wanted, move, is_source=False).to(self.dtype))

    def _at(self, tensors: Tensors, move: Move, *, is_source: bool) -> torch.Tensor:
        """The region of a move in a local tensor (a view)."""
        part = (self._held if is_source else self._wanted)[move.tensor]
        return tensors[move.tensor][tuple(slice(*span) for span in part.locate(move.box))]

    def _buffer(self, moves: Sequence[Move]) -> torch.Tensor:
        return torch.empty(sum(numel(move.box) for move in moves), dtype=self.dtype, device=self.device)

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


def _by_peer(bucket: Sequence[Move], peer_end: str, rank: int) -> Iterator[tuple[int, list[Move]]]:
    """The moves whose other end is `rank`, by peer."""
    other_end = "destination" if peer_end == "source" else "source"
    found: dict[int, list[Move]] = {}
    for move in bucket:
        if getattr(move, other_end) == rank:
            found.setdefault(getattr(move, peer_end), []).append(move)
    yield from sorted(found.items())


def _slices(moves: Sequence[Move], buffer: torch.Tensor) -> list[tuple[Move, torch.Tensor]]:
    """Each move with its stretch of the buffer, in the shape of its box."""
    shapes = [tuple(stop - first for first, stop in move.box) for move in moves]
    stretches = buffer.split([numel(move.box) for move in moves])
    return [(move, s.view(shape)) for move, s, shape in zip(moves, stretches, shapes, strict=True)]


def _is_same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.stride() == b.stride()


def _digest(move: Move, numbers: torch.Tensor) -> bytes:
    """Of name, place, dtype and bytes. The bytes are first reduced where they lie, to `_sums`, since a hash of all of them
    takes a processor core longer than copying them."""
    found = hashlib.blake2b(f"{move.tensor} {move.box} {numbers.dtype}".encode(), digest_size=_DIGEST_BYTES)
    flat = numbers.detach().contiguous().flatten()
    if flat.storage_offset() * flat.itemsize % _WORD_BYTES:
        flat = flat.clone()  # words begin at multiples of their size
    per_word = _WORD_BYTES // flat.itemsize
    whole = flat.numel() // per_word * per_word
    for rest in (_sums(flat[:whole].view(torch.int64)), flat[whole:]):
        found.update(bytes(rest.cpu().view(torch.uint8).numpy().data))
    return found.digest()


def _sums(words: torch.Tensor) -> torch.Tensor:
    """Sums of every so many words [any number of int64] times odd factors, modulo 2^64: other words, or words in another
    order, have other sums, but for one chance in some 2^32. The upper half is added to the lower one first, without which
    changes of an even number of sign bits would cancel out."""
    if words.device.type == "cpu":
        size = len(_FACTORS)
        mixed = torch.empty(min(size, len(words)), dtype=torch.int64)  # small enough to stay in a cache
        sums = torch.empty(-(-len(words) // size), dtype=torch.int64)
        for number, some in enumerate(words.split(size) if len(words) else ()):
            high = torch.bitwise_right_shift(some, 32, out=mixed[: len(some)])
            torch.dot(high.add_(some), _FACTORS[: len(some)], out=sums[number])
        return sums
    padded = F.pad((words >> 32) + words, (0, -len(words) % len(_FACTORS)))
    return (padded.view(-1, len(_FACTORS)) * _FACTORS.to(words.device)).sum(1)


def _wrong(move: Move) -> ModelError:
    whence = "what it has itself" if move.is_kept else f"what rank {move.source} sent"
    return ModelError(
        f"After the update of weights, rank {move.destination} does not hold {whence} of {move.tensor} at {list(move.box)}. "
        "These weights must not be used: update again, or rebuild the rollout engine."
    )
