"""Carrying out a plan between processes: in messages of bounded size or straight into the memory of a neighbour, and proved.

    transport = PeerToPeer(tensors, training, rollout, plan, dtype=torch.bfloat16, device=device, staging_bytes=64 << 20)
    transport(held, wanted)         # every rank of the group, at the same time

Senders cast before they send. Between ranks of one host that share memory a number is cast once, and written into every place
that lacks it; nothing waits in between. Elsewhere moves travel in buckets: while one is under way, the next one is cast and the
last one unpacked.

Proof: each sender says a digest of (name, place, dtype, bytes) of what it sent, and the receiver computes the same from
what its engine holds after everything has been written. A bucket that was lost, tensors that were swapped, or a write that
went over another are so found, by name. Ranks that generate with one memory divide this among them: each looks at what its
neighbour has written.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist

from verl.errors import ModelError
from verl.parallel.traffic import TRAFFIC
from verl.reshard.buckets import buckets
from verl.reshard.digest import DIGEST_BYTES, PORTION_BYTES, copy_with_digest, digest, spread_with_digest
from verl.reshard.host_memory import HostMemory
from verl.reshard.layout import Layout, Slot, Tensor
from verl.reshard.plan import Move, Plan
from verl.reshard.slices import Part, numel

_UNTOLD = bytes(DIGEST_BYTES)  # of what lies where it was trained: nothing was written
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
        homes = memory.homes if memory is not None else {}
        home = homes.get(self.rank, self.rank)
        self._held = {t.name: part for t in tensors if (part := source.part(t, self.rank)) is not None}
        self._wanted = {t.name: part for t in tensors if (part := target.part(t, home)) is not None}
        self._shapes_held = {name: part.shape for name, part in self._held.items()}
        self._shapes_wanted = {name: part.shape for name, part in self._wanted.items()}
        self._plan, self._most_bytes = plan, staging_bytes // 2  # two buckets are in memory at a time
        self._num_planned_bytes = plan.sent_bytes.get(self.rank, 0)
        self._indices: dict[tuple[str, object, bool], tuple[slice, ...] | None] = {}
        self._places: dict[Move, torch.Tensor] = {}  # in the memory of neighbours, of what this rank gives them
        by_name = {t.name: t for t in tensors}
        for move in plan.sends(self.rank):
            if memory is not None and move.destination in memory.places:
                part = target.part(by_name[move.tensor], move.destination)
                assert part is not None
                self._places[move] = memory.places[move.destination][move.tensor][_index(part, move)]
        self._arrange(homes, memory.pairs if memory is not None else frozenset())
        self._is_open = any(owner == self.rank for _, owner in memory.pairs) if memory is not None else False
        self._said: dict[Move, bytes] = {}  # of what this rank sent and kept
        self._proved: dict[Move, bytes] = {}  # what lies where this rank looks, since the last update

    def _arrange(self, homes: Mapping[int, int], pairs: frozenset[tuple[int, int]]) -> None:
        """`pairs` (sender, receiver) have memory between them; `homes` are rank -> the one in whose memory its weights lie."""
        direct = [m for m in self._plan.moves if m.is_kept or (m.source, m.destination) in pairs]
        puts: dict[tuple[str, object], list[Move]] = {}
        for move in direct:
            if move.source == self.rank:
                puts.setdefault((move.tensor, move.box), []).append(move)
        self._puts = list(puts.values())
        known = set(direct)
        in_buckets = list(buckets((m for m in self._plan.moves if m not in known), self._most_bytes))
        self._buckets = {
            number: bucket
            for number, moves in enumerate(in_buckets)
            if any(bucket := (_by_peer(moves, "source", self.rank), _by_peer(moves, "destination", self.rank)))
        }
        claims = _claims(direct, chain.from_iterable(in_buckets), homes)
        self._tells = {checker: moves for (teller, checker), moves in claims.items() if teller == self.rank}
        self._hears = {teller: moves for (teller, checker), moves in claims.items() if checker == self.rank}

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
        said = _UNTOLD
        if own and not theirs and not self._is_open and own[0].dtype == self.dtype:
            said = copy_with_digest(label, own[0], have)
        elif own or theirs:
            # a digest of what lies where others write could be of what they wrote there
            said = spread_with_digest(label, [*own, *theirs], have, self.dtype, self._most_bytes)
            if have.dtype != self.dtype or not have.is_contiguous():
                staged = min(PORTION_BYTES, self._most_bytes, have.numel() * self.dtype.itemsize)
                self._stage(staged)
                self._stage(-staged)
        self.num_sent_bytes += sum(move.num_bytes for move in moves)
        for move in moves:
            self._said[move] = said if own or not move.is_kept else _UNTOLD

    def _place(self, move: Move) -> torch.Tensor:
        return self._places[move]

    def _stage(self, num_bytes: int) -> None:
        self._staged += num_bytes
        self.peak_staging_bytes = max(self.peak_staging_bytes, self._staged)

    def _prove(self, wanted: Tensors) -> None:
        """Compare what the engine holds with what the senders say they sent, and with what was kept."""
        # first of all, as a rank that finds a fault leaves, and others need its digests
        self._proved = {move: said for move, said in self._exchange() if said != _UNTOLD}
        for moves in self._tells.values():
            for move in moves:
                if move not in self._said:
                    raise _wrong(move)
        self.check_held(wanted)

    def check_held(self, wanted: Tensors) -> None:
        """Raise ModelError unless `wanted` holds what the last update has brought; of a memory that several ranks share, the
        part at which this one looks."""
        self._check(wanted, self._shapes_wanted, "fill")
        for move, said in self._proved.items():
            if self._digest_of(move, wanted) != said:
                raise _wrong(move)

    def _exchange(self) -> list[tuple[Move, bytes]]:
        """Tell others the digests of what was sent, and hear theirs. What a source has written into memory is there when its
        digests are."""
        told = {
            peer: b"".join(self._said.get(move, _UNTOLD) for move in moves) or _UNTOLD
            for peer, moves in sorted(self._tells.items())
        }
        heard = {
            peer: torch.empty(max(1, len(moves)) * DIGEST_BYTES, dtype=torch.uint8, device=self.device)
            for peer, moves in sorted(self._hears.items())
            if peer != self.rank
        }
        ops = [dist.P2POp(dist.irecv, claim, peer, self.group, _DIGESTS) for peer, claim in heard.items()]
        for peer, digests in told.items():
            if peer != self.rank:
                claim = torch.frombuffer(bytearray(digests), dtype=torch.uint8).to(self.device)
                ops.append(dist.P2POp(dist.isend, claim, peer, self.group, _DIGESTS))
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()
        found = []
        for peer, moves in self._hears.items():
            digests = told[peer] if peer == self.rank else heard[peer].cpu().numpy().tobytes()
            found += [(move, digests[at * DIGEST_BYTES :][:DIGEST_BYTES]) for at, move in enumerate(moves)]
        return found

    def _digest_of(self, move: Move, wanted: Tensors) -> bytes:
        return digest(_label(move), self._at(wanted, move, is_source=False).to(self.dtype))

    def _at(self, tensors: Tensors, move: Move, *, is_source: bool) -> torch.Tensor:
        """The region of a move in a local tensor (a view)."""
        key = (move.tensor, move.box, is_source)
        if key not in self._indices:
            part = (self._held if is_source else self._wanted)[move.tensor]
            self._indices[key] = _index(part, move) if numel(move.box) < part.numel else None
        index = self._indices[key]
        return tensors[move.tensor] if index is None else tensors[move.tensor][index]

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


def _claims(
    direct: Sequence[Move], in_messages: Iterable[Move], homes: Mapping[int, int]
) -> dict[tuple[int, int], list[Move]]:
    """(Who wrote or sent, who looks at it) -> moves. What is written into a memory that several ranks share is looked at by
    the next of them after its source; nobody begins before all have written, so there are pairs without moves too."""
    sharers: dict[int, list[int]] = {}
    for rank, home in sorted(homes.items()):
        sharers.setdefault(home, []).append(rank)
    found: dict[tuple[int, int], list[Move]] = {}
    for move in direct:
        looking = sharers.get(move.destination, [move.destination])
        checker = looking[bisect_right(looking, move.source) % len(looking)]
        found.setdefault((move.source, checker), []).append(move)
    for source, home in sorted({(move.source, move.destination) for move in direct}):
        for rank in sharers.get(home, [home]):
            for teller in {source, home} - {rank}:
                found.setdefault((teller, rank), [])
    for move in in_messages:
        found.setdefault((move.source, move.destination), []).append(move)
    return found


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
