"""Regions of a tensor: boxes, what they share and what is left of them, and the part of a tensor that one rank holds.

All coordinates are those of the whole tensor; spans are half open, (first, one past the last). Pure, without torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

Span = tuple[int, int]
Box = tuple[Span, ...]  # one span per dimension; of a tensor without dimensions: ()


def numel(box: Box) -> int:
    """Elements of a box."""
    return math.prod(stop - first for first, stop in box)


def intersect(a: Box, b: Box) -> Box | None:
    """What two boxes share; None when that is nothing."""
    shared = []
    for (a_first, a_stop), (b_first, b_stop) in zip(a, b, strict=True):
        first, stop = max(a_first, b_first), min(a_stop, b_stop)
        if first >= stop:
            return None
        shared.append((first, stop))
    return tuple(shared)


def subtract(a: Box, b: Box) -> list[Box]:
    """`a` without `b`, as disjoint boxes."""
    shared = intersect(a, b)
    if shared is None:
        return [a]
    rest = []
    for dim, (first, stop) in enumerate(shared):
        for span in ((a[dim][0], first), (stop, a[dim][1])):
            if span[0] < span[1]:
                rest.append((*shared[:dim], span, *a[dim + 1 :]))
    return rest


@dataclass(frozen=True)
class Part:
    """What a rank holds of a tensor: the product of some spans of each dimension, which lie one after the other in the
    rank's local tensor.

    Part((((0, 4), (8, 12)), ((0, 16),)))      rows 0-3 and 8-11, all 16 columns; the local tensor is [8, 16]
    """

    spans: tuple[tuple[Span, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the local tensor."""
        return tuple(sum(stop - first for first, stop in dim) for dim in self.spans)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def boxes(self) -> Iterator[Box]:
        """The disjoint boxes that make up the part."""
        return itertools.product(*self.spans)

    def locate(self, box: Box) -> tuple[Span, ...]:
        """Where a box of the whole tensor lies in the local tensor. It must lie within one of `boxes()`."""
        return tuple(_locate(dim, span) for dim, span in zip(self.spans, box, strict=True))


def _locate(spans: Sequence[Span], wanted: Span) -> Span:
    before = 0
    for first, stop in spans:
        if first <= wanted[0] and wanted[1] <= stop:
            return before + wanted[0] - first, before + wanted[1] - first
        before += stop - first
    raise AssertionError(f"{wanted} does not lie within one of {spans}")


def take(spans: Sequence[Span], first: int, stop: int) -> tuple[Span, ...]:
    """Positions `first` to `stop` of what is counted through `spans` one after the other."""
    taken, before = [], 0
    for begin, end in spans:
        low, high = max(begin, begin + first - before), min(end, begin + stop - before)
        if low < high:
            taken.append((low, high))
        before += end - begin
    return tuple(taken)


def even_span(total: int, num_parts: int, index: int) -> Span:
    """Where part `index` of an even division lies: the first parts get one more where `num_parts` does not divide."""
    size, longer = divmod(total, num_parts)
    first = index * size + min(index, longer)
    return first, first + size + (index < longer)


def chunk_span(total: int, num_parts: int, index: int) -> Span:
    """Where chunk `index` of torch.chunk lies, as FSDP cuts dimension 0: equal chunks, the last ones shorter or empty."""
    size = -(-total // num_parts)
    return min(total, index * size), min(total, (index + 1) * size)


def cells(parts: Mapping[int, Part]) -> list[tuple[Box, tuple[int, ...]]]:
    """All that some rank holds, as disjoint boxes with the ranks that hold them; a box lies within one box of each of its
    holders' parts."""
    holders: dict[Box, list[int]] = {}
    for rank, part in parts.items():
        for box in part.boxes():
            holders.setdefault(box, []).append(rank)
    found: list[tuple[Box, tuple[int, ...]]] = []
    for box, ranks in holders.items():
        new, refined = [box], []
        for cell, owners in found:
            shared = intersect(cell, box)
            if shared is None:
                refined.append((cell, owners))
                continue
            refined.append((shared, (*owners, *ranks)))
            refined += [(rest, owners) for rest in subtract(cell, shared)]
            new = [rest for piece in new for rest in subtract(piece, shared)]
        found = refined + [(piece, tuple(ranks)) for piece in new]
    return found


def pieces(box: Box, most: int) -> list[Box]:
    """`box` cut into boxes of at most `most` elements (at least 1), along the first dimensions."""
    if numel(box) <= most:
        return [box]
    dim = next(dim for dim, (first, stop) in enumerate(box) if stop - first > 1)
    first, stop = box[dim]
    step = max(1, most // (numel(box) // (stop - first)))
    cuts = [(start, min(stop, start + step)) for start in range(first, stop, step)]
    return [piece for cut in cuts for piece in pieces((*box[:dim], cut, *box[dim + 1 :]), most)]
