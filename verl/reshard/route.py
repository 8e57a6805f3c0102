"""The way of a bucket of new weights over the ranks of a run: which rank sends it to which others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Route:
    """`source` has every bucket first. `link`: the source, and the first rank of each host that a bucket travels to. `nodes`:
    of a host, the rank with the bucket and the ranks that it broadcasts to. `roots`: rank that takes the weights -> the rank
    of its host with the bucket."""

    source: int
    link: tuple[int, ...]
    nodes: tuple[tuple[int, ...], ...]
    roots: Mapping[int, int]

    @classmethod
    def of(cls, trains: Sequence[int], takes: Sequence[int], hosts: Mapping[int, int], *, by_device: bool) -> Route:
        """Of `trains` to the ranks that take the weights, each `by_device` of its own, or one for a host."""
        link, nodes, roots = [trains[0]], list[tuple[int, ...]](), dict[int, int]()
        for host in sorted({hosts[rank] for rank in takes}):
            here = [rank for rank in takes if hosts[rank] == host]
            trained = [rank for rank in trains if hosts[rank] == host]
            root = (trained or here)[0]
            link += [] if trained else [root]
            further = tuple(rank for rank in here if rank != root and rank not in trains)
            nodes += [(root, *further)] if further and by_device else []
            roots |= dict.fromkeys(here, root)
        return cls(trains[0], tuple(link), tuple(nodes), roots)

    @property
    def relays(self) -> list[tuple[int, ...]]:
        """The broadcasts in hosts that have to wait for the link; others begin with it."""
        return [group for group in self.nodes if group[0] in self.link[1:]]

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The ranks of each broadcast; the first one sends."""
        return [group for group in (self.link, *self.nodes) if len(group) > 1]
