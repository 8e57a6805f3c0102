"""Slices of a tensor: intersection, difference and cuts; the part of a tensor that one rank holds; and the dimensions that
ranks divide, by the names of a decoder's parameters.

All coordinates refer to the undivided tensor; spans are half open, (first, one past the last). Pure, without torch.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

# modules of a decoder with weights that tensor parallel ranks divide (Shoeybi et al. 2019, arXiv:1909.08053): attention heads
# and columns of the MLP by output rows, the projections after them by input columns, embedding and head by tokens
COLUMN = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj")
ROW = ("o_proj", "down_proj")
VOCABULARY = ("embed_tokens", "lm_head")

Span = tuple[int, int]
Slice = tuple[Span, ...]  # one span per dimension; () of a scalar


def divided_dim(module: str, leaf: str) -> int | None:
    """The dimension of the parameter `leaf` of `module` that tensor parallel ranks divide; None if each has all of it."""
    if module in (*COLUMN, *VOCABULARY):
        return None if leaf == "lora_A" else 0
    return 1 if module in ROW and leaf in ("weight", "lora_A") else None


def numel(part: Slice) -> int:
    """Elements of a slice."""
    return math.prod(stop - first for first, stop in part)


def intersect(a: Slice, b: Slice) -> Slice | None:
    """The intersection of two slices; None when it is empty."""
    shared = []
    for (a_first, a_stop), (b_first, b_stop) in zip(a, b, strict=True):
        first, stop = max(a_first, b_first), min(a_stop, b_stop)
        if first >= stop:
            return None
        shared.append((first, stop))
    return tuple(shared)


def subtract(a: Slice, b: Slice) -> list[Slice]:
    """`a` without `b`, as disjoint slices."""
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
    """The part of a tensor that a rank holds: the product of some spans of each dimension, concatenated in the rank's local
    tensor.

    Part((((0, 4), (8, 12)), ((0, 16),)))      rows 0-3 and 8-11, all 16 columns; the local tensor is [8, 16]
    """

    spans: tuple[tuple[Span, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the local tensor."""
        return tuple(sum(stop - first for first, stop in dim) for dim in self.spans)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def slices(self) -> Iterator[Slice]:
        """The disjoint slices that make up the part."""
        return itertools.product(*self.spans)

    def locate(self, part: Slice) -> Slice:
        """A slice of the undivided tensor in coordinates of the local tensor. It must lie within one of `slices()`."""
        return tuple(_locate(dim, span) for dim, span in zip(self.spans, part, strict=True))


def _locate(spans: Sequence[Span], span: Span) -> Span:
    before = 0
    for first, stop in spans:
        if first <= span[0] and span[1] <= stop:
            return before + span[0] - first, before + span[1] - first
        before += stop - first
    raise AssertionError(f"{span} does not lie within one of {spans}")


def take(spans: Sequence[Span], first: int, stop: int) -> tuple[Span, ...]:
    """Positions `first` to `stop` of the concatenated `spans`."""
    taken, before = [], 0
    for begin, end in spans:
        low, high = max(begin, begin + first - before), min(end, begin + stop - before)
        if low < high:
            taken.append((low, high))
        before += end - begin
    return tuple(taken)


def even_span(total: int, num_parts: int, index: int) -> Span:
    """The span of part `index` of an even division; the first parts are one longer if `num_parts` does not divide."""
    size, longer = divmod(total, num_parts)
    first = index * size + min(index, longer)
    return first, first + size + (index < longer)


def chunk_span(total: int, num_parts: int, index: int) -> Span:
    """The span of chunk `index` of torch.chunk, as FSDP shards dimension 0: equal chunks, the last ones shorter or empty."""
    size = -(-total // num_parts)
    return min(total, index * size), min(total, (index + 1) * size)


def cells(parts: Mapping[int, Part]) -> list[tuple[Slice, tuple[int, ...]]]:
    """All elements that some rank holds, as disjoint slices with their holders. A slice lies within one slice of the part of
    each of its holders."""
    holders: dict[Slice, list[int]] = {}
    for rank, part in parts.items():
        for held in part.slices():
            holders.setdefault(held, []).append(rank)
    disjoint: list[tuple[Slice, tuple[int, ...]]] = []
    for held, ranks in holders.items():
        new, refined = [held], []
        for cell, owners in disjoint:
            shared = intersect(cell, held)
            if shared is None:
                refined.append((cell, owners))
                continue
            refined.append((shared, (*owners, *ranks)))
            refined += [(rest, owners) for rest in subtract(cell, shared)]
            new = [rest for remaining in new for rest in subtract(remaining, shared)]
        disjoint = refined + [(remaining, tuple(ranks)) for remaining in new]
    return disjoint


def cut(part: Slice, max_elements: int) -> list[Slice]:
    """`part` as slices of at most `max_elements` (at least 1), cut along the first dimensions."""
    if numel(part) <= max_elements:
        return [part]
    dim = next(dim for dim, (first, stop) in enumerate(part) if stop - first > 1)
    first, stop = part[dim]
    step = max(1, max_elements // (numel(part) // (stop - first)))
    spans = [(start, min(stop, start + step)) for start in range(first, stop, step)]
    return [smaller for span in spans for smaller in cut((*part[:dim], span, *part[dim + 1 :]), max_elements)]
