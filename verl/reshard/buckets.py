"""A plan in portions, such that no rank has more than so many bytes of it in its hands at a time. Pure, without torch."""

from __future__ import annotations

from collections.abc import Iterable

from verl.reshard.plan import Move
from verl.reshard.slices import numel, pieces


def buckets(moves: Iterable[Move], most_bytes: int) -> list[list[Move]]:
    """The moves that travel, in their order, in as few buckets as their order allows. In each, what a rank sends and
    receives is `most_bytes` at most; moves that are larger are cut. Every rank finds the same buckets.

    `most_bytes` is at least an element.
    """
    found: list[list[Move]] = []
    staged: dict[int, int] = {}
    for move in moves:
        if move.is_kept:
            continue
        for piece in _cut(move, most_bytes):
            ends = (piece.source, piece.destination)
            if not found or any(staged.get(rank, 0) + piece.num_bytes > most_bytes for rank in ends):
                found.append([])
                staged = {}
            found[-1].append(piece)
            for rank in ends:
                staged[rank] = staged.get(rank, 0) + piece.num_bytes
    return found


def _cut(move: Move, most_bytes: int) -> list[Move]:
    itemsize = move.num_bytes // numel(move.box)
    return [move._replace(box=box, num_bytes=numel(box) * itemsize) for box in pieces(move.box, most_bytes // itemsize)]
