"""Which rows go where: equal cost over ranks, few micro-batches under a token limit. Pure Python, deterministic."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def sequence_cost(num_tokens: int, linear: float = 1.0, quadratic: float = 0.0) -> float:
    """Cost of one sequence: `linear * T + quadratic * T**2` (projections grow with T, attention with its square).

    For a dense transformer layer of hidden size h, `linear=24 * h**2` and `quadratic=4 * h` are its forward FLOPs.
    """
    return linear * num_tokens + quadratic * num_tokens * num_tokens


class _Partial:
    """A partition of some rows into parts sorted by descending cost; `spread` is what differencing makes smaller."""

    __slots__ = ("first_row", "parts")

    def __init__(self, parts: list[tuple[float, list[int]]], first_row: int):
        self.parts = sorted(parts, key=lambda part: (-part[0], part[1]))
        self.first_row = first_row

    @property
    def spread(self) -> float:
        return self.parts[0][0] - self.parts[-1][0]

    def __lt__(self, other: _Partial) -> bool:
        return (-self.spread, self.first_row) < (-other.spread, other.first_row)

    def absorb(self, other: _Partial) -> _Partial:
        """Largest parts meet smallest ones: the differencing step for more than two parts."""
        joined = [
            (a_cost + b_cost, a_rows + b_rows)
            for (a_cost, a_rows), (b_cost, b_rows) in zip(self.parts, reversed(other.parts), strict=True)
        ]
        return _Partial(joined, min(self.first_row, other.first_row))


def _singletons(costs: Sequence[float], num_parts: int) -> list[_Partial]:
    empty: list[tuple[float, list[int]]] = [(0.0, []) for _ in range(num_parts - 1)]
    return [_Partial([(float(cost), [row]), *[(c, list(r)) for c, r in empty]], row) for row, cost in enumerate(costs)]


def _one_row_per_part(costs: Sequence[float], num_parts: int) -> list[_Partial]:
    """Blocks of `num_parts` rows of neighbouring cost; joining blocks keeps all parts equally long."""
    by_cost = sorted(range(len(costs)), key=lambda row: (costs[row], row))
    blocks = [by_cost[start : start + num_parts] for start in range(0, len(by_cost), num_parts)]
    return [_Partial([(float(costs[row]), [row]) for row in block], min(block)) for block in blocks]


def partition_by_cost(costs: Sequence[float], num_parts: int, equal_size: bool) -> list[list[int]]:
    """Rows cut into `num_parts` lists of nearly equal cost (largest differencing, Karmarkar and Karp 1982).

    `equal_size` gives every part the same number of rows. Rows are ascending within a part, parts ascend by their first
    row; the result depends on the arguments alone. Raises ValueError when there are fewer rows than parts, or when
    `equal_size` is asked and the rows do not divide.
    """
    num_rows = len(costs)
    if num_parts < 1 or num_rows < num_parts:
        raise ValueError(f"{num_rows} rows cannot fill {num_parts} parts; use at most {num_rows} parts.")
    if equal_size and num_rows % num_parts:
        raise ValueError(
            f"{num_rows} rows do not divide into {num_parts} equal parts; pad the batch or use equal_size=False."
        )
    heap = _one_row_per_part(costs, num_parts) if equal_size else _singletons(costs, num_parts)
    heapq.heapify(heap)
    while len(heap) > 1:
        widest = heapq.heappop(heap)
        heapq.heappush(heap, widest.absorb(heapq.heappop(heap)))
    parts = [sorted(rows) for _, rows in heap[0].parts]
    return sorted(_without_empty(parts, costs))


def _without_empty(parts: list[list[int]], costs: Sequence[float]) -> list[list[int]]:
    """An empty part (possible when many costs are 0) takes the cheapest row of the longest part."""
    for part in parts:
        if not part:
            donor = max(parts, key=len)
            row = min(donor, key=lambda r: (costs[r], r))
            donor.remove(row)
            part.append(row)
    return parts


def pack_by_tokens(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Rows packed into few bins of at most `max_tokens` tokens each; every row is in exactly one bin.

    First-fit decreasing: at most 11/9 of the fewest possible plus one (Johnson 1973). When cutting the rows in their
    own order needs no more bins, that is what is done. A row longer than the limit gets a bin of its own. Rows ascend
    within a bin and bins by their first row. Raises ValueError when `max_tokens` is not positive.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; a micro-batch needs room for at least one token.")
    in_order = _next_fit(lengths, max_tokens)
    decreasing = _first_fit_decreasing(lengths, max_tokens)
    return in_order if len(in_order) <= len(decreasing) else decreasing


def _next_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room = -1
    for row, length in enumerate(lengths):
        if length > room:
            bins.append([])
            room = max_tokens
        bins[-1].append(row)
        room -= length
    return bins


def _first_fit_decreasing(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Leaf i of a segment tree is the free room of bin i, so that each first fit is found in O(log rows)."""
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    size = 1
    while size < max(1, len(order)):
        size *= 2
    room = [max_tokens] * (2 * size)
    bins: list[list[int]] = []
    for row in order:
        length = lengths[row]
        if length > max_tokens:
            bins.append([row])
            room[size + len(bins) - 1] = -1  # not even an empty row joins it
            index = size + len(bins) - 1
        else:
            index = 1
            while index < size:
                index = 2 * index if room[2 * index] >= length else 2 * index + 1
            if index - size == len(bins):
                bins.append([])
            bins[index - size].append(row)
            room[index] -= length
        while index > 1:
            index //= 2
            room[index] = max(room[2 * index], room[2 * index + 1])
    return sorted(sorted(found) for found in bins)


def split_to(parts: list[list[int]], num_parts: int) -> list[list[int]]:
    """At least `num_parts` lists of the same rows, made by halving the longest one again and again.

    Raises ValueError when there are fewer rows than that.
    """
    if num_parts > sum(map(len, parts)):
        raise ValueError(f"{sum(map(len, parts))} rows cannot fill {num_parts} parts.")
    parts = [list(rows) for rows in parts]
    while len(parts) < num_parts:
        longest = max(parts, key=len)
        half = len(longest) // 2
        parts.append(longest[half:])
        del longest[half:]
    return sorted(parts)


def imbalance(costs: Sequence[float], parts: Sequence[Sequence[int]]) -> dict[str, float]:
    """How uneven the rows are if cut in their own order (min, max, minmax_diff), and how uneven `parts` are
    (balanced_min, balanced_max); `mean` is the cost per part. All but `mean` are sums over one part."""
    size = -(-len(costs) // len(parts))
    in_order = [sum(costs[start : start + size]) for start in range(0, len(costs), size)]
    balanced = [sum(costs[row] for row in part) for part in parts]
    return {
        "min": min(in_order),
        "max": max(in_order),
        "minmax_diff": max(in_order) - min(in_order),
        "balanced_min": min(balanced),
        "balanced_max": max(balanced),
        "mean": sum(costs) / len(parts),
    }
