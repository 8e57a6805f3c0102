"""Execution of a transfer plan: messages of bounded size, or writes into shared memory, both verified by digests.

    transport = PeerToPeer(tensors, training, rollout, plan, dtype=torch.bfloat16, device=device, staging_bytes=64 << 20)
    transport(held, wanted)         # every rank of the run, at the same time

Senders cast before they send. Between ranks of one host with shared memory, a value is cast once and written into every place
that needs it. Elsewhere moves travel in buckets: during the transfer of one, the next is cast and the last one unpacked.

Verification: each sender sends a digest of (name, slice, dtype, bytes) per move, and the receiver computes the same from the
engine's tensors after all writes. That reveals lost buckets, swapped tensors and overlapping writes, by name. Ranks that share
one memory divide this work: each verifies the writes of its neighbour.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist

from verl.errors import ModelError
from verl.parallel.slices import Part, numel
from verl.parallel.traffic import TRAFFIC
from verl.reshard.digest import CHUNK_BYTES, DIGEST_BYTES, copy_with_digest, digest, spread_with_digest
from verl.reshard.host_memory import HostMemory
from verl.reshard.layout import Layout, Tensor
from verl.reshard.plan import Move, Plan, buckets

_NOT_WRITTEN = bytes(DIGEST_BYTES)  # of slices that are trained and used in the same memory
_DIGEST_TAG = 1 << 20  # of messages with digests; the tag of a bucket is its number
Tensors = Mapping[str, torch.Tensor]


class _Flight(NamedTuple):
    """A bucket in transfer, and its incoming messages: peer, moves, values."""

    works: list[dist.Work]
    messages: list[tuple[int, list[Move], torch.Tensor]]
    num_bytes: int


class PeerToPeer:
    """Sends and receives of one rank. Every rank of the run constructs it with the same arguments.

    `dtype` is the rollout's; every Tensor.itemsize is its size. `staging_bytes` bounds the buffers on this rank, and
    `peak_staging_bytes` is the largest use. `num_sent_bytes` counts bytes sent in messages or through memory. Waits end with
    the timeout of the run's group. Ranks with rollout weights in `memory` get no messages from ranks that can
    write it.
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
        memory: HostMemory | None = None,
    ):
        assert all(tensor.itemsize == dtype.itemsize for tensor in tensors)
        assert staging_bytes >= 2 * dtype.itemsize
        self.rank, self.dtype, self.device = dist.get_rank(), dtype, device
        self.peak_staging_bytes = self.num_sent_bytes = self._staged = 0
        owners = memory.owners if memory is not None else {}
        owner = owners.get(self.rank, self.rank)
        self._held = {t.name: part for t in tensors if (part := source.part(t, self.rank)) is not None}
        self._target_parts = {t.name: part for t in tensors if (part := target.part(t, owner)) is not None}
        self._held_shapes = {name: part.shape for name, part in self._held.items()}
        self._target_shapes = {name: part.shape for name, part in self._target_parts.items()}
        self._plan, self._bucket_bytes = plan, staging_bytes // 2  # two buckets are in memory at a time
        self._num_planned_bytes = plan.sent_bytes.get(self.rank, 0)
        self._indices: dict[tuple[str, object, bool], tuple[slice, ...] | None] = {}
        self._places: dict[Move, torch.Tensor] = {}  # of moves from this rank, in the memory of the destination
        by_name = {t.name: t for t in tensors}
        for move in plan.sends(self.rank):
            if memory is not None and move.destination in memory.places:
                part = target.part(by_name[move.tensor], move.destination)
                assert part is not None
                self._places[move] = memory.places[move.destination][move.tensor][_index(part, move)]
        self._arrange(owners, memory.pairs if memory is not None else frozenset())
        self._is_open = any(other == self.rank for _, other in memory.pairs) if memory is not None else False
        self._sent: dict[Move, bytes] = {}  # digests of the moves that this rank sent and kept
        self._verified: dict[Move, bytes] = {}  # digests of the moves that this rank verifies, since the last update

    def _arrange(self, owners: Mapping[int, int], pairs: frozenset[tuple[int, int]]) -> None:
        """Sort the moves into writes to memory, for the `pairs` (writer, owner), and buckets of messages."""
        direct = [m for m in self._plan.moves if m.is_kept or (m.source, m.destination) in pairs]
        puts: dict[tuple[str, object], list[Move]] = {}
        for move in direct:
            if move.source == self.rank:
                puts.setdefault((move.tensor, move.slice), []).append(move)
        self._puts = list(puts.values())
        direct_moves = set(direct)
        in_buckets = list(buckets((m for m in self._plan.moves if m not in direct_moves), self._bucket_bytes))
        self._buckets = {
            number: bucket
            for number, moves in enumerate(in_buckets)
            if any(bucket := (_by_peer(moves, "source", self.rank), _by_peer(moves, "destination", self.rank)))
        }
        checks = _checks(direct, chain.from_iterable(in_buckets), owners)
        self._digests_to = {checker: moves for (sender, checker), moves in checks.items() if sender == self.rank}
        self._digests_from = {sender: moves for (sender, checker), moves in checks.items() if checker == self.rank}

    def __call__(self, held: Tensors, target: Tensors) -> None:
        """Fill `target` (this rank's parts in the target layout, of any dtype) from the `held` of all ranks (their parts in
        the source layout). The two may share memory only if they are the same elements. From the first rank's call until
        the last one has returned, `target` must not be used: callers synchronise before and after.

        Raises ModelError when a tensor is missing, has another shape than its part, or does not match its digest. It is
        raised only on that rank; the caller informs the remaining ranks.
        """
        self.check(held, target)
        self._staged, self._sent = 0, {}
        with torch.no_grad(), TRAFFIC.exchanging(self._num_planned_bytes):
            flight: _Flight | None = None
            for number in self._buckets:
                following = self._start(number, held)
                if flight is not None:
                    self._finish(flight, target)
                flight = following
            for moves in self._puts:
                self._put(moves, held, target)
            if flight is not None:
                self._finish(flight, target)
            self._verify(target)

    def check(self, held: Tensors, target: Tensors) -> None:
        """Raise ModelError when a tensor is missing or has another shape than its part."""
        self._check(held, self._held_shapes, "hold")
        self._check(target, self._target_shapes, "fill")

    def _start(self, number: int, held: Tensors) -> _Flight:
        """Pack and send a bucket, and post its receives."""
        incoming, outgoing = self._buckets[number]
        messages = [(peer, moves, self._buffer(moves)) for peer, moves in incoming.items()]
        ops = [dist.P2POp(dist.irecv, message, peer, tag=number) for peer, _, message in messages]
        num_bytes = sum(message.nbytes for _, _, message in messages)
        for peer, moves in outgoing.items():
            message = self._buffer(moves)
            for move, place in _views(moves, message):
                self._sent[move] = copy_with_digest(_label(move), place, self._at(held, move, is_source=True))
            ops.append(dist.P2POp(dist.isend, message, peer, tag=number))
            num_bytes += message.nbytes
            self.num_sent_bytes += message.nbytes
        self._stage(num_bytes)
        return _Flight(dist.batch_isend_irecv(ops), messages, num_bytes)

    def _finish(self, flight: _Flight, target: Tensors) -> None:
        """Wait for a bucket and unpack it."""
        for work in flight.works:
            work.wait()
        for _, moves, message in flight.messages:
            self._unpack(moves, message, target)
        self._stage(-flight.num_bytes)

    def _unpack(self, moves: Sequence[Move], message: torch.Tensor, target: Tensors) -> None:
        for move, values in _views(moves, message):
            self._at(target, move, is_source=False).copy_(values)

    def _put(self, moves: Sequence[Move], held: Tensors, target: Tensors) -> None:
        """Write one slice to every place in memory that needs it: this rank's own places and its neighbours' places."""
        source, label = self._at(held, moves[0], is_source=True), _label(moves[0])
        local = [self._at(target, move, is_source=False) for move in moves if move.is_kept]
        if local and _address(source) == _address(local[0]):
            local = []
        remote = [self._place(move) for move in moves if not move.is_kept]
        written = _NOT_WRITTEN
        if local and not remote and not self._is_open and local[0].dtype == self.dtype:
            written = copy_with_digest(label, local[0], source)
        elif local or remote:
            # hashed before the write: another rank may write to the same places
            written = spread_with_digest(label, [*local, *remote], source, self.dtype, self._bucket_bytes)
            if source.dtype != self.dtype or not source.is_contiguous():
                staged = min(CHUNK_BYTES, self._bucket_bytes, source.numel() * self.dtype.itemsize)
                self._stage(staged)
                self._stage(-staged)
        self.num_sent_bytes += sum(move.num_bytes for move in moves)
        for move in moves:
            self._sent[move] = written if local or not move.is_kept else _NOT_WRITTEN

    def _place(self, move: Move) -> torch.Tensor:
        return self._places[move]

    def _stage(self, num_bytes: int) -> None:
        self._staged += num_bytes
        self.peak_staging_bytes = max(self.peak_staging_bytes, self._staged)

    def _verify(self, target: Tensors) -> None:
        """Compare the engine's tensors with the digests of the senders."""
        # exchanged first: a rank that finds a fault raises, and its peers need its digests
        self._verified = {move: sent for move, sent in self._exchange() if sent != _NOT_WRITTEN}
        for moves in self._digests_to.values():
            for move in moves:
                if move not in self._sent:
                    raise _mismatch(move)
        self.check_held(target)

    def check_held(self, target: Tensors) -> None:
        """Raise ModelError unless `target` still holds the last update; of shared memory, each rank verifies its share."""
        self._check(target, self._target_shapes, "fill")
        for move, sent in self._verified.items():
            if digest(_label(move), self._at(target, move, is_source=False).to(self.dtype)) != sent:
                raise _mismatch(move)

    def _exchange(self) -> list[tuple[Move, bytes]]:
        """Send the digests of this rank's moves and receive those to verify. A rank has written to memory before it sends
        the digests."""
        outgoing = {
            peer: b"".join(self._sent.get(move, _NOT_WRITTEN) for move in moves) or _NOT_WRITTEN
            for peer, moves in sorted(self._digests_to.items())
        }
        incoming = {
            peer: torch.empty(max(1, len(moves)) * DIGEST_BYTES, dtype=torch.uint8, device=self.device)
            for peer, moves in sorted(self._digests_from.items())
            if peer != self.rank
        }
        ops = [dist.P2POp(dist.irecv, message, peer, tag=_DIGEST_TAG) for peer, message in incoming.items()]
        for peer, digests in outgoing.items():
            if peer != self.rank:
                message = torch.frombuffer(bytearray(digests), dtype=torch.uint8).to(self.device)
                ops.append(dist.P2POp(dist.isend, message, peer, tag=_DIGEST_TAG))
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()
        digests_of_moves = []
        for peer, moves in self._digests_from.items():
            digests = outgoing[peer] if peer == self.rank else incoming[peer].cpu().numpy().tobytes()
            digests_of_moves += [(move, digests[at * DIGEST_BYTES :][:DIGEST_BYTES]) for at, move in enumerate(moves)]
        return digests_of_moves

    def _at(self, tensors: Tensors, move: Move, *, is_source: bool) -> torch.Tensor:
        """The slice of a move in a local tensor, as a view."""
        key = (move.tensor, move.slice, is_source)
        if key not in self._indices:
            part = (self._held if is_source else self._target_parts)[move.tensor]
            self._indices[key] = _index(part, move) if numel(move.slice) < part.numel else None
        index = self._indices[key]
        return tensors[move.tensor] if index is None else tensors[move.tensor][index]

    def _buffer(self, moves: Sequence[Move]) -> torch.Tensor:
        return torch.empty(sum(numel(move.slice) for move in moves), dtype=self.dtype, device=self.device)

    def _check(self, tensors: Tensors, shapes: Mapping[str, tuple[int, ...]], what: str) -> None:
        for name, shape in shapes.items():
            if name not in tensors:
                raise ModelError(
                    f"Rank {self.rank} should {what} {list(shape)} of {name}, which is not there; the layouts do not "
                    "describe this model."
                )
            if tensors[name].shape != shape:
                raise ModelError(
                    f"Rank {self.rank} should {what} {list(shape)} of {name}, but its tensor is "
                    f"{list(tensors[name].shape)}; the layouts do not describe this model."
                )


def _by_peer(bucket: Sequence[Move], peer_end: str, rank: int) -> dict[int, list[Move]]:
    """Peer -> the moves between it and `rank`, with the peer at one end; peers ascend."""
    other_end = "destination" if peer_end == "source" else "source"
    by_peer: dict[int, list[Move]] = {}
    for move in bucket:
        if getattr(move, other_end) == rank:
            by_peer.setdefault(getattr(move, peer_end), []).append(move)
    return dict(sorted(by_peer.items()))


def _checks(
    direct: Sequence[Move], in_messages: Iterable[Move], owners: Mapping[int, int]
) -> dict[tuple[int, int], list[Move]]:
    """(Writer or sender, checker) -> moves. The checker of a write to shared memory is the next sharer after the writer. No
    rank starts to verify before all have written, so some pairs have no moves."""
    sharers: dict[int, list[int]] = {}
    for rank, owner in sorted(owners.items()):
        sharers.setdefault(owner, []).append(rank)
    checks: dict[tuple[int, int], list[Move]] = {}
    for move in direct:
        checkers = sharers.get(move.destination, [move.destination])
        checker = checkers[bisect_right(checkers, move.source) % len(checkers)]
        checks.setdefault((move.source, checker), []).append(move)
    for source, owner in sorted({(move.source, move.destination) for move in direct}):
        for rank in sharers.get(owner, [owner]):
            for writer in {source, owner} - {rank}:
                checks.setdefault((writer, rank), [])
    for move in in_messages:
        checks.setdefault((move.source, move.destination), []).append(move)
    return checks


def _index(part: Part, move: Move) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in part.locate(move.slice))


def _label(move: Move) -> str:
    return f"{move.tensor} {move.slice}"


def _views(moves: Sequence[Move], buffer: torch.Tensor) -> list[tuple[Move, torch.Tensor]]:
    """Each move with its view of the buffer, in the shape of its slice."""
    shapes = [tuple(stop - first for first, stop in move.slice) for move in moves]
    flat = buffer.split([numel(move.slice) for move in moves])
    return [(move, values.view(shape)) for move, values, shape in zip(moves, flat, shapes, strict=True)]


def _address(values: torch.Tensor) -> tuple[object, ...]:
    return values.data_ptr(), values.dtype, values.stride()


def _mismatch(move: Move) -> ModelError:
    source = "what it trained" if move.is_kept else f"what rank {move.source} sent"
    return ModelError(
        f"After the weight sync, rank {move.destination} does not hold {source} for {move.tensor} at {list(move.slice)}. "
        "These weights must not be used: update again, or rebuild the rollout engine."
    )
