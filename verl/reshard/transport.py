"""Carrying out a plan between processes: in messages of bounded size or straight into the memory of a neighbour, and proved.

    transport = PeerToPeer(tensors, training, rollout, plan, dtype=torch.bfloat16, device=device, staging_bytes=64 << 20)
    transport(held, wanted)         # every rank of the group, at the same time

Senders cast before they send. Between ranks of one host that share memory a number is cast once, and written into every place
that lacks it; nothing waits in between. Elsewhere moves travel in buckets: while one is under way, the next one is cast and the
last one unpacked.

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
from verl.parallel.traffic import TRAFFIC
from verl.reshard.buckets import buckets
from verl.reshard.digest import DIGEST_BYTES, PORTION_BYTES, copy_with_digest, digest, spread_with_digest
from verl.reshard.host_memory import HostMemory
from verl.reshard.layout import Layout, Slot, Tensor
from verl.reshard.parts import Part, numel
from verl.reshard.plan import Move, Plan

_DIGESTS = 1 << 20  # tag of the messages that bring them; those of buckets are their numbers
Tensors = Mapping[str, torch.Tensor]


def source_views(engine: Tensors, slots: Mapping[str, Slot]) -> dict[str, torch.Tensor]:
    """Name of a tensor of the model -> its place in the engine's tensors, which may be fused (RolloutLayout.slots)."""
    return {name: engine[slot.name][slot.first : slot.stop] for name, slot in slots.items()}


class _Flight(NamedTuple):
    """A bucket that is under way, and the messages in which it comes: peer, moves, numbers."""

    works: list[dist.Work]
    parcels: list[tuple[int, list[Move], torch.Tensor]]
    num_bytes: int


class PeerToPeer:
    """Sends and receives of one rank. Made by every rank of `group` with the same arguments.

    `dtype` is the rollout's; every Tensor.itemsize is its size. `staging_bytes` bounds the buffers on this rank, of which
    `peak_staging_bytes` says how much was used. `num_sent_bytes` counts what has left this rank, in messages or through
    memory. Waits end with the timeout of `group` (default: the whole run's). With `memory`, ranks that have what is wanted of
    them there get it without messages.
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
        group: dist.ProcessGroup | None = None,
    ):
        assert all(tensor.itemsize == dtype.itemsize for tensor in tensors)
        assert staging_bytes >= 2 * dtype.itemsize
        self.rank, self.group, self.dtype, self.device = dist.get_rank(), group, dtype, device
        self.peak_staging_bytes = self.num_sent_bytes = self._staged = 0
        self._held = {t.name: part for t in tensors if (part := source.part(t, self.rank)) is not None}
        self._wanted = {t.name: part for t in tensors if (part := target.part(t, self.rank)) is not None}
        self._shapes_held = {name: part.shape for name, part in self._held.items()}
        self._shapes_wanted = {name: part.shape for name, part in self._wanted.items()}
        self._plan, self._most_bytes = plan, staging_bytes // 2  # two buckets are in memory at a time
        self._kept, self._sends = plan.kept(self.rank), plan.sends(self.rank)
        self._num_planned_bytes = plan.sent_bytes.get(self.rank, 0)
        self._indices: dict[tuple[str, object, bool], tuple[slice, ...]] = {}
        self._places: dict[Move, torch.Tensor] = {}  # in the memory of neighbours, of what this rank gives them
        by_name = {t.name: t for t in tensors}
        for move in self._sends:
            if memory is not None and move.destination in memory.places:
                part = target.part(by_name[move.tensor], move.destination)
                assert part is not None
                self._places[move] = memory.places[move.destination][move.tensor][_index(part, move)]
        self._arrange(memory.pairs if memory is not None else frozenset())
        self._is_open = any(owner == self.rank for _, owner in memory.pairs) if memory is not None else False
        self._said: dict[Move, bytes | None] = {}  # of what this rank sent and kept; None: the same memory, trained in
        self._proved: dict[Move, bytes] = {}  # what came and was kept in the last update

    def _arrange(self, pairs: frozenset[tuple[int, int]]) -> None:
        """`pairs` (sender, receiver) have memory between them."""
        direct = [m for m in self._plan.moves if m.is_kept or (m.source, m.destination) in pairs]
        self._comes = [m for m in direct if m.destination == self.rank and not m.is_kept]  # without a message
        puts: dict[tuple[str, object], list[Move]] = {}
        for move in direct:
            if move.source == self.rank:
                puts.setdefault((move.tensor, move.box), []).append(move)
        self._puts = list(puts.values())
        known = set(direct)
        self._buckets = {
            number: bucket
            for number, moves in enumerate(buckets((m for m in self._plan.moves if m not in known), self._most_bytes))
            if any(bucket := (_by_peer(moves, "source", self.rank), _by_peer(moves, "destination", self.rank)))
        }

    def __call__(self, held: Tensors, wanted: Tensors) -> None:
        """Fill `wanted` (this rank's parts in the target layout, of any dtype) out of what all ranks have in `held` (its
        parts in the source layout). They share memory only where both are the same elements. From the first call of a rank
        until the last one has returned nobody may use `wanted`: callers agree before and after.

        Raises ModelError when a tensor is missing, has another shape than its part, or does not hold what was sent; on the
        rank where that is so, and the caller tells the others.
        """
        self.check(held, wanted)
        self._staged, self._said = 0, {}
        with torch.no_grad(), TRAFFIC.exchanging(self._num_planned_bytes):
            flight: _Flight | None = None
            for number in self._buckets:
                following = self._start(number, held)
                if flight is not None:
                    self._finish(flight, wanted)
                flight = following
            for moves in self._puts:
                self._put(moves, held, wanted)
            if flight is not None:
                self._finish(flight, wanted)
            self._prove(wanted)

    def check(self, held: Tensors, wanted: Tensors) -> None:
        """Raise ModelError when a tensor is missing or has another shape than its part."""
        self._check(held, self._shapes_held, "hold")
        self._check(wanted, self._shapes_wanted, "fill")

    def _start(self, number: int, held: Tensors) -> _Flight:
        """Pack and send a bucket, and ask for what others send."""
        incoming, outgoing = self._buckets[number]
        parcels = [(peer, moves, self._buffer(moves)) for peer, moves in incoming.items()]
        ops = [dist.P2POp(dist.irecv, message, peer, self.group, number) for peer, _, message in parcels]
        num_bytes = sum(message.nbytes for _, _, message in parcels)
        for peer, moves in outgoing.items():
            message = self._buffer(moves)
            for move, place in _slices(moves, message):
                self._said[move] = copy_with_digest(_label(move), place, self._at(held, move, is_source=True))
            ops.append(dist.P2POp(dist.isend, message, peer, self.group, number))
            num_bytes += message.nbytes
            self.num_sent_bytes += message.nbytes
        self._stage(num_bytes)
        return _Flight(dist.batch_isend_irecv(ops), parcels, num_bytes)

    def _finish(self, flight: _Flight, wanted: Tensors) -> None:
        """Put what has come into its place."""
        for work in flight.works:
            work.wait()
        for _, moves, message in flight.parcels:
            self._unpack(moves, message, wanted)
        self._stage(-flight.num_bytes)

    def _unpack(self, moves: Sequence[Move], message: torch.Tensor, wanted: Tensors) -> None:
        for move, numbers in _slices(moves, message):
            self._at(wanted, move, is_source=False).copy_(numbers)

    def _put(self, moves: Sequence[Move], held: Tensors, wanted: Tensors) -> None:
        """One region that this rank has, to all places in memory that want it: its own and those of neighbours."""
        have, label = self._at(held, moves[0], is_source=True), _label(moves[0])
        kept = [move for move in moves if move.is_kept]
        own = [self._at(wanted, move, is_source=False) for move in kept]
        if own and _is_same_memory(have, own[0]):
            own = []
        theirs = [self._place(move) for move in moves if not move.is_kept]
        said = None
        if own and not theirs and not self._is_open and own[0].dtype == self.dtype:
            said = copy_with_digest(label, own[0], have)
        elif own or theirs:
            # a digest of what lies where others write could be of what they wrote there
            said = spread_with_digest(label, [*own, *theirs], have, self.dtype, self._most_bytes)
            if have.dtype != self.dtype:
                staged = min(PORTION_BYTES, self._most_bytes, have.numel() * self.dtype.itemsize)
                self._stage(staged)
                self._stage(-staged)
        self.num_sent_bytes += sum(move.num_bytes for move in moves)
        for move in moves:
            self._said[move] = said
        if not own:
            self._said.update(dict.fromkeys(kept))

    def _place(self, move: Move) -> torch.Tensor:
        return self._places[move]

    def _stage(self, num_bytes: int) -> None:
        self._staged += num_bytes
        self.peak_staging_bytes = max(self.peak_staging_bytes, self._staged)

    def _prove(self, wanted: Tensors) -> None:
        """Compare what the engine holds with what the senders say they sent, and with what was kept."""
        in_messages = [move for incoming, _ in self._buckets.values() for moves in incoming.values() for move in moves]
        received = [*self._comes, *in_messages]
        self._proved = {}
        # first of all, as a rank that finds a fault leaves, and others need its digests
        said = self._exchange(Counter(move.source for move in received))
        for move in received:
            self._proved[move] = next(said[move.source])
        for move in self._kept:
            if move not in self._said:
                raise _wrong(move)
            if (kept := self._said[move]) is not None:
                self._proved[move] = kept
        self.check_held(wanted)

    def check_held(self, wanted: Tensors) -> None:
        """Raise ModelError unless `wanted` holds what the last update has brought."""
        self._check(wanted, self._shapes_wanted, "fill")
        for move, said in self._proved.items():
            if self._digest_of(move, wanted) != said:
                raise _wrong(move)

    def _exchange(self, counts: Mapping[int, int]) -> dict[int, Iterator[bytes]]:
        """Send the digests of what was sent; returns source -> its digests, in the order of the moves, as many as `counts`
        says. What a source has written into memory is there when its digests are."""
        said = {
            peer: torch.empty(n * DIGEST_BYTES, dtype=torch.uint8, device=self.device) for peer, n in counts.items()
        }
        ops = [dist.P2POp(dist.irecv, claim, peer, self.group, _DIGESTS) for peer, claim in sorted(said.items())]
        for peer, digests in sorted(self._digests_for_others().items()):
            claim = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8).to(self.device)
            ops.append(dist.P2POp(dist.isend, claim, peer, self.group, _DIGESTS))
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()
        return {
            peer: (bytes(row.tolist()) for row in claim.cpu().view(-1, DIGEST_BYTES)) for peer, claim in said.items()
        }

    def _digests_for_others(self) -> dict[int, list[bytes]]:
        """Peer -> of what this rank has sent it, in the order in which it looks at them."""
        direct = [move for move in self._sends if move in self._places]
        in_messages = [move for _, outgoing in self._buckets.values() for moves in outgoing.values() for move in moves]
        found: dict[int, list[bytes]] = {}
        for move in (*direct, *in_messages):
            said = self._said[move]
            assert said is not None
            found.setdefault(move.destination, []).append(said)
        return found

    def _digest_of(self, move: Move, wanted: Tensors) -> bytes:
        return digest(_label(move), self._at(wanted, move, is_source=False).to(self.dtype))

    def _at(self, tensors: Tensors, move: Move, *, is_source: bool) -> torch.Tensor:
        """The region of a move in a local tensor (a view)."""
        key = (move.tensor, move.box, is_source)
        if key not in self._indices:
            self._indices[key] = _index((self._held if is_source else self._wanted)[move.tensor], move)
        return tensors[move.tensor][self._indices[key]]

    def _buffer(self, moves: Sequence[Move]) -> torch.Tensor:
        return torch.empty(_count(moves), dtype=self.dtype, device=self.device)

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
    found: dict[int, list[Move]] = {}
    for move in bucket:
        if getattr(move, other_end) == rank:
            found.setdefault(getattr(move, peer_end), []).append(move)
    return dict(sorted(found.items()))


def _count(moves: Sequence[Move]) -> int:
    return sum(numel(move.box) for move in moves)


def _index(part: Part, move: Move) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in part.locate(move.box))


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
