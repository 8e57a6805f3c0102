"""Weights for generation in memory that all ranks of a host can write into: new ones go from the rank that casts them straight
to the place where they are used.

    rank 0 trains [w]  --cast-->  rank 0 generates [w]          one pass over w: cast, summed for the proof, and written to
                       --cast-->  rank 1 generates [w]          every place on the host that lacks it

Ranks whose weights are the same (whole copies, or the same part of several) have them in one memory, that of the first of them:
nobody changes weights while they generate, and each number is written once for all.

The memory has no name (verl.reshard.shared_memory). Which ranks reach each other is found out by opening, since names of hosts
can mislead where containers are at work.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Iterable, Mapping

import torch

from verl.errors import ModelError, WorkerLostError
from verl.parallel.collectives import Collectives
from verl.parallel.serialize import from_bytes, to_bytes
from verl.reshard.shared_memory import Segment, as_numbers, open_segment

_PROOF_BYTES = 16
_ALIGNMENT = 64  # bytes


class HostMemory:
    """Made by all ranks together, each with the `weights` that it generates with (empty: none). Ranks with the same `likeness`
    have the same weights; without one a rank is like no other.

    `homes` are rank -> the rank in whose memory its weights lie; `pairs` are (writer, home), all that reach each other; and
    `places` are home -> name -> the weight there, for homes that this rank can write into. Where another rank can, `weights`
    have been moved; they are the same objects.
    """

    def __init__(self, comm: Collectives, weights: Mapping[str, torch.Tensor], likeness: str = ""):
        proof = os.urandom(_PROOF_BYTES)
        runs = _runs(weights.values())
        mine = _segment(sum(map(_num_bytes, runs))) if runs else None
        if mine is not None:
            mine.memory[:_PROOF_BYTES] = proof
        cards = [from_bytes(row) for row in comm.all_gather(to_bytes(_card(mine, proof, likeness)))]
        theirs = {
            rank: memory
            for rank, card in enumerate(cards)
            if rank != comm.rank and card is not None and (memory := _opened(rank, *card)) is not None
        }
        opened = [from_bytes(row) for row in comm.all_gather(to_bytes(list(theirs)))]
        reached = {(writer, owner) for writer, owners in enumerate(opened) for owner in owners}
        self.homes = _homes([None if card is None else card[-1] for card in cards], reached)
        self.pairs = frozenset((writer, owner) for writer, owner in reached if self.homes[owner] == owner)
        home = self.homes.get(comm.rank)
        table: dict[str, tuple[int, str, list[int], list[int]]] = {}
        if mine is not None and any(owner == comm.rank for _, owner in self.pairs):
            _move(runs, as_numbers(mine.memory, 0, mine.num_bytes, torch.uint8))
            table = {name: _place(weight) for name, weight in weights.items() if weight.numel()}
        if mine is not None:
            mine.close()  # whoever can write into it has it open
        tables = [from_bytes(row) for row in comm.all_gather(to_bytes(table))]
        self.places = {
            rank: {name: _at(memory, *place) for name, place in tables[rank].items()}
            for rank, memory in theirs.items()
            if self.homes[rank] == rank
        }
        is_shared = any(rank != comm.rank and where == home for rank, where in self.homes.items())
        if home is not None and home != comm.rank:
            for name, place in self.places[home].items():
                weights[name].data = place
            table = tables[home]
        self._addresses = {name: weights[name].data_ptr() for name in table}
        self._shared = {name: weights[name].detach() for name in table} if is_shared else {}

    def has_moved(self, weights: Mapping[str, torch.Tensor]) -> bool:
        """Whether some of this rank's weights lie elsewhere now, where nobody can write."""
        return any(name in weights and weights[name].data_ptr() != address for name, address in self._addresses.items())

    def differing(self, weights: Mapping[str, torch.Tensor]) -> str:
        """A weight that has been moved out of memory that ranks share and is not what lies there; "" for none."""
        for name, place in self._shared.items():
            mine = weights.get(name)
            if mine is not None and mine.data_ptr() != place.data_ptr() and not torch.equal(mine, place):
                return name
        return ""


def _homes(likenesses: list[str | None], reached: set[tuple[int, int]]) -> dict[int, int]:
    """Rank with memory -> the first one that is like it and that it reaches, or itself."""
    homes: dict[int, int] = {}
    for rank, likeness in enumerate(likenesses):
        if likeness is not None:
            like = (r for r in homes if likenesses[r] == likeness != "" and homes[r] == r and (rank, r) in reached)
            homes[rank] = next(like, rank)
    return homes


def _runs(weights: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Weights that lie back to back, or upon one another, together; in the order of their addresses."""
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
    """What a run takes, aligned."""
    num_bytes = max(map(_end, run)) - run[0].data_ptr()
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


@torch.no_grad()
def _move(runs: list[list[torch.Tensor]], memory: torch.Tensor) -> None:
    """One run after the other into `memory` (uint8): where one was is free before the next one is copied. Within a run weights
    keep their distances: matrix products compute with several as one."""
    first = 0
    for run in runs:
        num_bytes, base = _num_bytes(run), run[0].data_ptr()
        for weight in run:
            start = (first + weight.data_ptr() - base) // weight.itemsize
            weight.data = _view(memory, start, weight.dtype, weight.shape, weight.stride()).copy_(weight)
        first += num_bytes


def _view(
    memory: torch.Tensor, start: int, dtype: torch.dtype, shape: Iterable[int], stride: Iterable[int]
) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), start, tuple(shape), tuple(stride))


def _place(weight: torch.Tensor) -> tuple[int, str, list[int], list[int]]:
    """Of a weight that has been moved: its first element, format, shape and strides."""
    return (
        int(weight.storage_offset()),
        str(weight.dtype).removeprefix("torch."),
        list(weight.shape),
        list(weight.stride()),
    )


def _at(memory: mmap.mmap, start: int, dtype: str, shape: list[int], stride: list[int]) -> torch.Tensor:
    return _view(as_numbers(memory, 0, len(memory), torch.uint8), start, getattr(torch, dtype), shape, stride)


def _segment(num_bytes: int) -> Segment | None:
    try:
        return Segment(max(num_bytes, _PROOF_BYTES))
    except (ModelError, OSError):  # a system without it: everything goes over connections
        return None


def _card(segment: Segment | None, proof: bytes, likeness: str) -> tuple[str, str, int, bytes, str] | None:
    return None if segment is None else (socket.gethostname(), segment.path, segment.num_bytes, proof, likeness)


def _opened(rank: int, host: str, path: str, num_bytes: int, proof: bytes, likeness: str) -> mmap.mmap | None:
    """None for a rank of another host (whatever its `likeness`), or behind the walls of another container: there the path is
    nobody's, or leads to something else."""
    if host != socket.gethostname():
        return None
    try:
        memory = open_segment(path, num_bytes, f"The memory of rank {rank}")
    except (ModelError, WorkerLostError, OSError, ValueError):
        return None
    return memory if memory[:_PROOF_BYTES] == proof else None
