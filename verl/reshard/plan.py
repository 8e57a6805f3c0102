"""Transfer plan from one layout of weights to another: a list of moves, the same on every rank. Pure, without torch.

    plan = make_plan(tensors, training, rollout, hosts)
    plan.sends(rank), plan.sent_bytes, plan.received_bytes, plan.total_bytes

A rank keeps the slices that it holds. A missing slice comes from the nearest holder: one on its host if there is one. Among
equally near holders, the holder that sends the least is chosen; slices with a single holder are assigned first.

Bytes received per rank for a model of M bytes, training p-t-d, generation p_g-t_g with d_g = p t / (p_g t_g)
(HybridFlow, arXiv:2409.19256, Table 2):

    DeepSpeed-Chat, gather over all ranks     (t p d - 1) / (t p d) M
    HybridFlow-V, gather over a replica       (t p - 1) / (t p) M
    HybridFlow, interval groups               (d_g - 1) / (t p) M

The last row is exactly the bytes that a rank is missing, so no plan for those groups moves less. A plan of this module moves
exactly the missing bytes for any groups. Table 2 assumes that every parameter is sharded by t. Of replicated
parameters (norms) a rank receives (p/p_g - 1)/p of their bytes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from verl.errors import ConfigError
from verl.parallel.slices import Slice, cells, cut, intersect, numel
from verl.reshard.layout import Layout, Tensor

Hosts = Mapping[int, int]  # rank -> host


class Move(NamedTuple):
    """A slice of a tensor that goes from rank `source` to `destination`; if they are equal, it is kept and costs 0 bytes.

    It lies within one slice of the part that each of the two holds (Part.slices), so it is one block of both local tensors.

    >>> Move("lm_head.weight", source=0, destination=2, slice=((0, 8), (0, 16)), num_bytes=256).num_bytes
    256
    """

    tensor: str
    source: int
    destination: int
    slice: Slice
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
        """Bytes on the wire, over all ranks."""
        return sum(move.num_bytes for move in self.moves)

    @cached_property
    def sent_bytes(self) -> dict[int, int]:
        """Rank -> bytes that it sends; ranks that send nothing are left out."""
        return self._sums("source")

    @cached_property
    def received_bytes(self) -> dict[int, int]:
        """Rank -> bytes that it receives; ranks that receive nothing are left out."""
        return self._sums("destination")

    def sends(self, rank: int) -> list[Move]:
        """Moves from `rank`, in order."""
        return [m for m in self.moves if m.source == rank and not m.is_kept]

    def _sums(self, end: str) -> dict[int, int]:
        sums: dict[int, int] = {}
        for move in self.moves:
            if not move.is_kept:
                rank = getattr(move, end)
                sums[rank] = sums.get(rank, 0) + move.num_bytes
        return sums


class _Need(NamedTuple):
    """A slice that `destination` needs, and its possible sources: itself, or its nearest holders."""

    slice: Slice
    destination: int
    holders: tuple[int, ...]


def make_plan(tensors: Sequence[Tensor], source: Layout, target: Layout, hosts: Hosts | None = None) -> Plan:
    """Moves that give every rank of `target` its part of each tensor, from the parts that the ranks of `source` hold.

    The same arguments give the same plan. Without `hosts`, all ranks are on one. Raises ConfigError when no rank holds
    a slice that is needed.
    """
    needed = _needs_by_tensor(tensors, source, target, hosts)
    sent: dict[int, int] = dict.fromkeys(source.ranks, 0)
    for tensor, needs in zip(tensors, needed, strict=True):
        for need in needs:
            if len(need.holders) == 1 and need.holders[0] != need.destination:
                sent[need.holders[0]] += numel(need.slice) * tensor.itemsize
    moves: list[Move] = []
    for tensor, needs in zip(tensors, needed, strict=True):
        moves += _assign(tensor, needs, sent)
    return Plan(tuple(moves))


def _needs_by_tensor(
    tensors: Sequence[Tensor], source: Layout, target: Layout, hosts: Hosts | None
) -> list[list[_Need]]:
    cached: dict[object, list[_Need]] = {}  # the layers of a model are alike
    needs = []
    for tensor in tensors:
        alike = (replace(tensor, name="", layers=()), source.stages_of(tensor), target.stages_of(tensor))
        if alike not in cached:
            cached[alike] = _needs(tensor, source, target, hosts)
        needs.append(cached[alike])
    return needs


def _needs(tensor: Tensor, source: Layout, target: Layout, hosts: Hosts | None) -> list[_Need]:
    held = {rank: part for rank in source.ranks if (part := source.part(tensor, rank)) is not None}
    everything = sorted(cells(held))
    needs = []
    for rank in sorted(target.ranks):
        part = target.part(tensor, rank)
        if part is None:
            continue
        lacking = part.numel
        for target_slice in part.slices():
            for cell, owners in everything:
                shared = intersect(cell, target_slice)
                if shared is not None:
                    lacking -= numel(shared)
                    needs.append(_Need(shared, rank, _nearest(rank, owners, hosts)))
        if lacking:
            raise ConfigError(
                f"Rollout rank {rank} needs {lacking} elements of {tensor.name} that no training rank holds; the layouts do "
                "not describe the same model."
            )
    return needs


def _nearest(rank: int, owners: tuple[int, ...], hosts: Hosts | None) -> tuple[int, ...]:
    if rank in owners:
        return (rank,)
    if hosts is not None:
        beside = tuple(owner for owner in owners if hosts[owner] == hosts[rank])
        return beside or owners
    return owners


def _assign(tensor: Tensor, needs: list[_Need], sent: dict[int, int]) -> list[Move]:
    """A source for each slice; adds the bytes of slices with several holders to `sent`. Large slices are assigned first, and
    small ones even out the difference."""
    sources = [need.holders[0] for need in needs]
    sizes = [numel(need.slice) * tensor.itemsize for need in needs]
    open_choices = [index for index, need in enumerate(needs) if len(need.holders) > 1]
    for index in sorted(open_choices, key=lambda i: -sizes[i]):
        _, destination, holders = needs[index]
        # ties go to the next rank above the destination, so that they spread over the holders
        sources[index] = min(holders, key=lambda rank: (sent[rank], rank < destination, rank))
        sent[sources[index]] += sizes[index]
    return [
        Move(tensor.name, rank, need.destination, need.slice, 0 if rank == need.destination else size)
        for need, rank, size in zip(needs, sources, sizes, strict=True)
    ]


def buckets(moves: Iterable[Move], max_bytes: int) -> list[list[Move]]:
    """The moves between ranks, in order, in as few buckets as that order allows. In a bucket every rank sends and receives
    at most `max_bytes` (at least one element); larger moves are cut. Every rank computes the same buckets."""
    filled: list[list[Move]] = []
    staged: dict[int, int] = {}
    for move in moves:
        if move.is_kept:
            continue
        itemsize = move.num_bytes // numel(move.slice)
        for part in cut(move.slice, max_bytes // itemsize):
            num_bytes, ends = numel(part) * itemsize, (move.source, move.destination)
            if not filled or any(staged.get(rank, 0) + num_bytes > max_bytes for rank in ends):
                filled.append([])
                staged = {}
            filled[-1].append(move._replace(slice=part, num_bytes=num_bytes))
            for rank in ends:
                staged[rank] = staged.get(rank, 0) + num_bytes
    return filled
