"""Which bytes travel when weights go from one layout to another: a list of moves, the same on every rank. Pure, without torch.

    plan = make_plan(tensors, training, rollout, hosts)
    plan.sends(rank), plan.receives(rank), plan.kept(rank), plan.total_bytes

A rank keeps what it holds. What it lacks comes from the nearest holder: on its host if there is one. Among equally near
holders the one with the least to send is taken, those moves first that have no choice.

Bytes received per rank for a model of M bytes, training p-t-d, generation p_g-t_g with d_g = p t / (p_g t_g)
(HybridFlow, arXiv:2409.19256, Table 2):

    DeepSpeed-Chat, gather over all ranks     (t p d - 1) / (t p d) M
    HybridFlow-V, gather over a replica       (t p - 1) / (t p) M
    HybridFlow, interval groups               (d_g - 1) / (t p) M

The last is what a rank needs and does not hold, so no plan for those groups moves less. What is made here moves exactly
that, for any groups: `lower_bound`. Table 2 assumes that every parameter is divided by t; of those that all tensor parallel
ranks hold (norms) a rank receives (p/p_g - 1)/p of their bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from verl.errors import ConfigError
from verl.reshard.layout import Layout, Tensor
from verl.reshard.slices import Box, cells, intersect, numel

Hosts = Mapping[int, int]  # rank -> host


class Move(NamedTuple):
    """A box of the whole tensor goes from `source` to `destination`; when they are the same rank it is kept, for 0 bytes.

    The box lies within one box of what each of the two holds (Part.boxes), so that it is one block of both local tensors.
    """

    tensor: str
    source: int
    destination: int
    box: Box
    num_bytes: int

    @property
    def is_kept(self) -> bool:
        return self.source == self.destination


@dataclass(frozen=True)
class Plan:
    """`moves` are by tensor in the model's order, then by destination, then by place in the tensor. Two ranks that
    exchange several moves see them in the same order."""

    moves: tuple[Move, ...]

    @property
    def total_bytes(self) -> int:
        """On the wire, over all ranks."""
        return sum(move.num_bytes for move in self.moves)

    @cached_property
    def sent_bytes(self) -> dict[int, int]:
        """Rank -> bytes that leave it; ranks that send nothing are left out."""
        return self._sums("source")

    @cached_property
    def received_bytes(self) -> dict[int, int]:
        """Rank -> bytes that reach it; ranks that receive nothing are left out."""
        return self._sums("destination")

    def sends(self, rank: int) -> list[Move]:
        """What `rank` sends, in order."""
        return [m for m in self.moves if m.source == rank and not m.is_kept]

    def receives(self, rank: int) -> list[Move]:
        """What `rank` receives, in order."""
        return [m for m in self.moves if m.destination == rank and not m.is_kept]

    def kept(self, rank: int) -> list[Move]:
        """What `rank` needs and has already."""
        return [m for m in self.moves if m.destination == rank and m.is_kept]

    def bytes_between_hosts(self, hosts: Hosts) -> int:
        """The part of `total_bytes` that leaves a host."""
        return sum(m.num_bytes for m in self.moves if hosts[m.source] != hosts[m.destination])

    def _sums(self, end: str) -> dict[int, int]:
        sums: dict[int, int] = {}
        for move in self.moves:
            if not move.is_kept:
                rank = getattr(move, end)
                sums[rank] = sums.get(rank, 0) + move.num_bytes
        return sums


class _Piece(NamedTuple):
    """A box that `destination` needs, and the ranks that it may come from: itself, or its nearest holders."""

    box: Box
    destination: int
    holders: tuple[int, ...]


def make_plan(tensors: Sequence[Tensor], source: Layout, target: Layout, hosts: Hosts | None = None) -> Plan:
    """Moves that give every rank of `target` its part of each tensor, out of what the ranks of `source` hold.

    The same arguments give the same plan. Without `hosts`, all ranks are on one. Raises ConfigError when no rank holds
    something that is needed.
    """
    needed = _pieces_by_tensor(tensors, source, target, hosts)
    sent: dict[int, int] = dict.fromkeys(source.ranks, 0)
    for tensor, pieces in zip(tensors, needed, strict=True):
        for piece in pieces:
            if len(piece.holders) == 1 and piece.holders[0] != piece.destination:
                sent[piece.holders[0]] += numel(piece.box) * tensor.itemsize
    moves: list[Move] = []
    for tensor, pieces in zip(tensors, needed, strict=True):
        moves += _assign(tensor, pieces, sent)
    return Plan(tuple(moves))


def lower_bound(tensors: Iterable[Tensor], source: Layout, target: Layout) -> dict[int, int]:
    """Rank of `target` -> bytes that it needs and does not hold: no plan brings it less."""
    found = dict.fromkeys(target.ranks, 0)
    for tensor in tensors:
        for rank in target.ranks:
            wanted, held = target.part(tensor, rank), source.part(tensor, rank)
            if wanted is None:
                continue
            here = 0
            if held is not None:
                shared = (intersect(a, b) for a in wanted.boxes() for b in held.boxes())
                here = sum(numel(box) for box in shared if box is not None)
            found[rank] += (wanted.numel - here) * tensor.itemsize
    return found


def full_gather(
    tensors: Iterable[Tensor], source: Layout, ranks: Iterable[int], held_itemsize: int | None = None
) -> dict[int, int]:
    """What plans are compared with: rank -> bytes that reach it when each of `ranks` gathers every parameter whole over the
    training ranks, and cuts its part out of that. Parameters travel as they are held, `held_itemsize` bytes an element
    (float32 masters: 4; default: the rollout's format, as in a plan)."""
    found = dict.fromkeys(ranks, 0)
    for tensor in tensors:
        itemsize = held_itemsize or tensor.itemsize
        for rank in found:
            held = source.part(tensor, rank)
            found[rank] += (math.prod(tensor.shape) - (held.numel if held is not None else 0)) * itemsize
    return found


def _pieces_by_tensor(
    tensors: Sequence[Tensor], source: Layout, target: Layout, hosts: Hosts | None
) -> list[list[_Piece]]:
    known: dict[object, list[_Piece]] = {}  # the layers of a model are alike
    found = []
    for tensor in tensors:
        alike = (replace(tensor, name="", layers=()), source.stages_of(tensor), target.stages_of(tensor))
        if alike not in known:
            known[alike] = _pieces(tensor, source, target, hosts)
        found.append(known[alike])
    return found


def _pieces(tensor: Tensor, source: Layout, target: Layout, hosts: Hosts | None) -> list[_Piece]:
    held = {rank: part for rank in source.ranks if (part := source.part(tensor, rank)) is not None}
    everything = sorted(cells(held))
    found = []
    for rank in sorted(target.ranks):
        part = target.part(tensor, rank)
        if part is None:
            continue
        lacking = part.numel
        for box in part.boxes():
            for cell, owners in everything:
                shared = intersect(cell, box)
                if shared is not None:
                    lacking -= numel(shared)
                    found.append(_Piece(shared, rank, _nearest(rank, owners, hosts)))
        if lacking:
            raise ConfigError(
                f"Rollout rank {rank} needs {lacking} elements of {tensor.name} that no training rank holds; the layouts do "
                "not describe the same model."
            )
    return found


def _nearest(rank: int, owners: tuple[int, ...], hosts: Hosts | None) -> tuple[int, ...]:
    if rank in owners:
        return (rank,)
    if hosts is not None:
        beside = tuple(owner for owner in owners if hosts[owner] == hosts[rank])
        return beside or owners
    return owners


def _assign(tensor: Tensor, pieces: list[_Piece], sent: dict[int, int]) -> list[Move]:
    """A source for each piece; adds to `sent` what those with a choice send. Large pieces choose first, so that small
    ones even out what they leave."""
    sources = [piece.holders[0] for piece in pieces]
    sizes = [numel(piece.box) * tensor.itemsize for piece in pieces]
    choosers = [index for index, piece in enumerate(pieces) if len(piece.holders) > 1]
    for index in sorted(choosers, key=lambda i: -sizes[i]):
        _, destination, holders = pieces[index]
        # among equals the next one up from the destination: not all turn to the first
        sources[index] = min(holders, key=lambda rank: (sent[rank], rank < destination, rank))
        sent[sources[index]] += sizes[index]
    return [
        Move(tensor.name, rank, piece.destination, piece.box, 0 if rank == piece.destination else size)
        for piece, rank, size in zip(pieces, sources, sizes, strict=True)
    ]
