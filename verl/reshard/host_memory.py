"""Rollout weights in memory that all ranks of a host can write: the rank that casts new weights writes them into place.

    rank 0 trains [w]  --cast-->  rank 0 generates [w]          one pass over w: cast, digest, and write to every rank of
                       --cast-->  rank 1 generates [w]          the host that lacks it

Ranks with equal weights (complete copies, or the same shard in several engines) keep them in the memory of the first of
these ranks: weights do not change during generation, and each value is written once for all.

The memory has no name (verl.parallel.segments). Ranks find out by opening it whether they reach it, since host names
are unreliable with containers.
"""

from collections.abc import Iterable, Mapping

import torch

from verl.parallel.collectives import Collectives
from verl.parallel.segments import SegmentCard, try_segment
from verl.parallel.serialize import from_bytes, to_bytes

_ALIGNMENT = 64  # bytes


class HostMemory:
    """A collective: every rank passes the `weights` that it generates with (empty: none). Ranks with the same non-empty
    `fingerprint` have the same weights.

    `owners` maps a rank to the rank whose memory holds its weights. `pairs` are all (writer, owner) where the writer can reach
    the owner's memory. `places` maps an owner that this rank can write to its weights by name. `weights` that another rank
    can write are moved in place: their `data` changes, the objects stay.
    """

    def __init__(self, comm: Collectives, weights: Mapping[str, torch.Tensor], fingerprint: str = ""):
        runs = _runs(weights.values())
        segment = try_segment(sum(map(_num_bytes, runs))) if runs else None
        card = None if segment is None else (*SegmentCard.of(segment), fingerprint)
        cards = [from_bytes(row) for row in comm.all_gather(to_bytes(card))]
        opened_memory = {
            rank: memory
            for rank, card in enumerate(cards)
            if rank != comm.rank and card is not None and (memory := SegmentCard(*card[:-1]).open(rank)) is not None
        }
        opened = [from_bytes(row) for row in comm.all_gather(to_bytes(list(opened_memory)))]
        reached = {(writer, owner) for writer, owners in enumerate(opened) for owner in owners}
        self.owners = _owners([None if card is None else card[-1] for card in cards], reached)
        self.pairs = frozenset((writer, owner) for writer, owner in reached if self.owners[owner] == owner)
        owner = self.owners.get(comm.rank)
        table: dict[str, tuple[int, str, list[int], list[int]]] = {}
        if segment is not None and any(other == comm.rank for _, other in self.pairs):
            _move(runs, segment.values)
            table = {name: _place(weight) for name, weight in weights.items() if weight.numel()}
        if segment is not None:
            segment.close()  # every rank that can write has it open
        tables = [from_bytes(row) for row in comm.all_gather(to_bytes(table))]
        self.places = {
            rank: {name: _view(memory, *weight) for name, weight in tables[rank].items()}
            for rank, memory in opened_memory.items()
            if self.owners[rank] == rank
        }
        is_shared = any(rank != comm.rank and other == owner for rank, other in self.owners.items())
        if owner is not None and owner != comm.rank:
            for name, place in self.places[owner].items():
                weights[name].data = place
            table = tables[owner]
        self._addresses = {name: weights[name].data_ptr() for name in table}
        self._shared = {name: weights[name].detach() for name in table} if is_shared else {}

    def has_moved(self, weights: Mapping[str, torch.Tensor]) -> bool:
        """Whether some of this rank's weights have left the shared memory."""
        return any(name in weights and weights[name].data_ptr() != address for name, address in self._addresses.items())

    def differing(self, weights: Mapping[str, torch.Tensor]) -> str:
        """Name of a weight that has left the shared memory and differs from the value there; "" for none."""
        for name, place in self._shared.items():
            weight = weights.get(name)
            if weight is not None and weight.data_ptr() != place.data_ptr() and not torch.equal(weight, place):
                return name
        return ""


def hosts_of(comm: Collectives) -> dict[int, int]:
    """A collective: rank -> the first rank with memory that it can open, which stands for their host; itself without one."""
    segment = try_segment(0)
    card = None if segment is None else tuple(SegmentCard.of(segment))
    cards = [from_bytes(row) for row in comm.all_gather(to_bytes(card))]
    earlier = (r for r, card in enumerate(cards[: comm.rank]) if card and SegmentCard(*card).open(r) is not None)
    firsts = comm.all_gather(to_bytes(next(earlier, comm.rank)))
    if segment is not None:
        segment.close()  # every rank has tried
    return dict(enumerate(map(from_bytes, firsts)))


def _owners(fingerprints: list[str | None], reached: set[tuple[int, int]]) -> dict[int, int]:
    """Rank with memory -> the first reachable rank with the same fingerprint, or itself."""
    owners: dict[int, int] = {}
    for rank, fingerprint in enumerate(fingerprints):
        if fingerprint is not None:
            same = (
                r for r in owners if fingerprints[r] == fingerprint != "" and owners[r] == r and (rank, r) in reached
            )
            owners[rank] = next(same, rank)
    return owners


def _runs(weights: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Weights in the order of their addresses; weights that adjoin or overlap are in one list."""
    runs: list[list[torch.Tensor]] = []
    end = -1
    for weight in sorted({id(w): w for w in weights if w.numel()}.values(), key=torch.Tensor.data_ptr):
        if not runs or weight.data_ptr() > end or weight.dtype != runs[-1][0].dtype:
            runs.append([])
        runs[-1].append(weight)
        end = max(end, _end(weight))
    return runs


def _end(weight: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(weight.shape, weight.stride(), strict=True))
    return weight.data_ptr() + (last + 1) * weight.itemsize


def _num_bytes(run: list[torch.Tensor]) -> int:
    """Bytes of a run, aligned."""
    num_bytes = max(map(_end, run)) - run[0].data_ptr()
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


@torch.no_grad()
def _move(runs: list[list[torch.Tensor]], memory: torch.Tensor) -> None:
    """Copy one run after the other into `memory`, uint8; each frees its old place before the next is copied. Weights of a run
    keep their distances: some matmuls treat several as one matrix."""
    first = 0
    for run in runs:
        num_bytes, base = _num_bytes(run), run[0].data_ptr()
        for weight in run:
            start = (first + weight.data_ptr() - base) // weight.itemsize
            _, dtype, *shape = _place(weight)
            weight.data = _view(memory, start, dtype, *shape).copy_(weight)
        first += num_bytes


def _view(memory: torch.Tensor, start: int, dtype: str, shape: Iterable[int], stride: Iterable[int]) -> torch.Tensor:
    return torch.empty(0, dtype=getattr(torch, dtype)).set_(
        memory.untyped_storage(), start, tuple(shape), tuple(stride)
    )


def _place(weight: torch.Tensor) -> tuple[int, str, list[int], list[int]]:
    """Offset in elements, dtype, shape and strides of a moved weight."""
    return (
        int(weight.storage_offset()),
        str(weight.dtype).removeprefix("torch."),
        list(weight.shape),
        list(weight.stride()),
    )
