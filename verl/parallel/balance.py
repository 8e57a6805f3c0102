"""Division of rows: equal cost over ranks, few micro-batches under a token limit. Pure and deterministic."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.errors import DataError
from verl.parallel.process_settings import without_collection

if TYPE_CHECKING:
    from verl.data_proto.proto import DataProto

_EVEN = 1.01  # largest ratio of the costliest share to the mean that leaves prompts undivided
_AT_HOME = 1.25  # and that leaves rows where they were sampled: a forward is a third of an update

Rows = list[int]
Part = tuple[float, Rows]  # -cost, rows


class _Partial:
    """A partition of some rows into `num_parts` sorted parts; `parts` are the ones with rows."""

    __slots__ = ("first_row", "num_parts", "parts")

    def __init__(self, parts: list[Part], num_parts: int, first_row: int):
        self.parts, self.num_parts, self.first_row = sorted(parts), num_parts, first_row

    def ranked(self) -> tuple[float, int, _Partial]:
        """In the order of a heap, the widest first; no two have one first row."""
        costs = [self.parts[0][0], self.parts[-1][0], *([0.0] if len(self.parts) < self.num_parts else [])]
        return min(costs) - max(costs), self.first_row, self

    def absorb(self, other: _Partial) -> _Partial:
        """Largest parts meet smallest ones: the differencing step for more than two parts. Ends both partitions."""
        first_row = min(self.first_row, other.first_row)
        if not self.parts[-1][0] < 0 > other.parts[-1][0]:  # rows without cost come behind empty parts
            joined = _joined(self._with_empty(), other._with_empty()[::-1])
            return _Partial(joined, self.num_parts, first_row)
        few, many = sorted((self, other), key=lambda partial: len(partial.parts))
        room = self.num_parts - len(many.parts)
        largest, smallest = few.parts[room:], [many.parts.pop() for _ in few.parts[room:]]
        for part in few.parts[:room] + (_joined(largest, smallest) if few is self else _joined(smallest, largest)):
            insort(many.parts, part)
        many.first_row = first_row
        return many

    def _with_empty(self) -> list[Part]:
        return sorted(self.parts + [(0.0, list[int]())] * (self.num_parts - len(self.parts)))


def _joined(parts: list[Part], added: list[Part]) -> list[Part]:
    pairs = zip(parts, added, strict=True)
    return [(a_cost + b_cost, a_rows + b_rows) for (a_cost, a_rows), (b_cost, b_rows) in pairs if a_rows or b_rows]


def _blocks(costs: Sequence[float], num_parts: int) -> Iterable[Rows]:
    """Blocks of `num_parts` rows of neighbouring cost; joining blocks keeps all parts equally long."""
    by_cost = sorted(range(len(costs)), key=lambda row: (costs[row], row))
    return (by_cost[start : start + num_parts] for start in range(0, len(by_cost), num_parts))


def partition_by_cost(costs: Sequence[float], num_parts: int, equal_size: bool) -> list[list[int]]:
    """Rows cut into `num_parts` lists of nearly equal cost (largest differencing, Karmarkar and Karp 1982).

    `equal_size` gives every part the same number of rows. Rows are ascending within a part, parts ascend by their first
    row; the result depends only on the arguments. Raises ValueError when there are fewer rows than parts, or when
    `equal_size` is asked and the rows do not divide.
    """
    num_rows = len(costs)
    if num_parts < 1 or num_rows < num_parts:
        raise ValueError(f"{num_rows} rows cannot fill {num_parts} parts; use at most {num_rows} parts.")
    if equal_size and num_rows % num_parts:
        raise ValueError(
            f"{num_rows} rows do not divide into {num_parts} equal parts; pad the batch or use equal_size=False."
        )
    with without_collection():  # thousands of small lists, no garbage among them
        blocks = _blocks(costs, num_parts) if equal_size else ([row] for row in range(num_rows))
        # only the heap holds partitions: lists of rows that earlier ones keep would grow with the square of the rows
        heap = [
            _Partial([(-float(costs[row]), [row]) for row in block], num_parts, min(block)).ranked() for block in blocks
        ]
        heapq.heapify(heap)
        while len(heap) > 1:
            *_, widest = heapq.heappop(heap)
            heapq.heapreplace(heap, widest.absorb(heap[0][-1]).ranked())
    parts = [sorted(rows) for _, rows in heap[0][-1].parts]
    return sorted(_without_empty(parts + [list[int]() for _ in range(num_parts - len(parts))], costs))


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

    First-fit decreasing: at most 11/9 of the fewest possible plus one (Johnson 1973). Rows are cut in their order in the batch
    if that needs no more bins. A row longer than the limit gets a separate bin. Rows ascend within a bin and bins by their
    first row. Raises ValueError when `max_tokens` is not positive.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; a micro-batch holds at least one token.")
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
    """Leaf i of a segment tree is the free space of bin i, so that each first fit is found in O(log rows)."""
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
    return sorted(sorted(members) for members in bins)


@dataclass(frozen=True)
class TokenCost:
    """Cost of a row of T tokens: `linear` T + `quadratic` T^2 operations (projections grow with T, attention with its square;
    `ModelShape.flops` of the planner computes a model's coefficients).

    Rows that share a prompt compute it once on one rank, and once more on every further rank that gets some of them.
    """

    linear: float = 6144.0
    quadratic: float = 1.0

    def __call__(self, num_tokens: Any) -> Any:
        """Of one row, or of each of an array."""
        return self.linear * num_tokens + self.quadratic * num_tokens * num_tokens


def contiguous_shares(num_rows: int, num_parts: int) -> list[Rows]:
    """Neighbouring rows; sizes differ by at most one and the last parts may be empty."""
    return [rows.tolist() for rows in np.array_split(np.arange(num_rows), num_parts)]


def shares_by_cost(costs: Sequence[float], num_parts: int) -> list[Rows]:
    """Rows with nearly equal sums of `costs`; with fewer rows than parts the last ones are empty."""
    if len(costs) > num_parts:
        return partition_by_cost(costs, num_parts, equal_size=False)
    return [[row] for row in range(len(costs))] + [[] for _ in range(num_parts - len(costs))]


def unit_ids(batch: DataProto, unit: str) -> list[int]:
    """A number for each row, equal for the rows of a unit: rows with the same value in the column `unit`; "row": each row
    is its own. Raises DataError when there is no such column."""
    if unit == "row":
        return list(range(len(batch)))
    if unit in batch.batch.keys():
        values = batch.batch[unit].tolist()
    elif unit in batch.non_tensor_batch:
        values = list(batch.non_tensor_batch[unit])
    else:
        raise DataError(f"The batch has no column {unit!r}, which says for each row which rows stay together with it.")
    first: dict[object, int] = {}
    return [first.setdefault(value, row) for row, value in enumerate(values)]


def balanced_shares(
    batch: DataProto,
    num_parts: int,
    cost: TokenCost,
    rows: Sequence[int] | np.ndarray | None = None,
    computed: Sequence[int] | np.ndarray | None = None,
    unit: str = "row",
    home: np.ndarray | None = None,
) -> list[np.ndarray]:
    """`rows` of the batch (default all) over `num_parts` ranks with nearly equal cost, as int32; ascending within a part. Rows
    of one `unit` are in one part; with fewer units than parts the last parts are empty. Rows that are not `computed`
    (default: all are) cost nothing.

    The samples of a prompt stay together if the costliest share is at most a hundredth above the mean, or if dividing single
    rows does not make it cheaper. Prompts that are then computed twice count twice.

    `home` is a part for each row of the batch where its forward is known. Each row gets it, unless the costliest share then is
    more than a quarter above the mean.
    """
    chosen = np.arange(len(batch), dtype=np.int32) if rows is None else np.asarray(rows, np.int32)
    if num_parts == 1:
        return [chosen]  # in the given order
    units: np.ndarray = np.arange(len(chosen), dtype=np.int32)
    first: np.ndarray = units
    if unit != "row":
        units = _numbered(np.array(unit_ids(batch, unit), np.int32)[chosen])
        first = np.unique(units, return_index=True)[1]
    if len(first) <= num_parts:
        return [np.sort(chosen[units == part]) for part in range(num_parts)]
    names = _numbered(_prompt_names(batch)[chosen])
    lengths = _lengths(batch)
    costs_of_length = cost(np.arange(lengths[1].max() + 1.0))
    prompts, responses = (costs_of_length[row_lengths[chosen]] for row_lengths in lengths)
    responses -= prompts
    del lengths
    if computed is not None:
        is_left_out = np.isin(chosen, computed, invert=True)
        prompts[is_left_out] = responses[is_left_out] = 0.0

    costs = partial(_costs_of_parts, names, prompts, responses)

    def divided(numbers: np.ndarray) -> np.ndarray:
        """The part of each row; rows of one number are in one part."""
        part_of = np.empty(numbers.max() + 1, np.int32)
        for part, members in enumerate(partition_by_cost(costs(numbers).tolist(), num_parts, equal_size=False)):
            part_of[members] = part
        return part_of.take(numbers)

    if home is not None and unit == "row" and (sums := costs(home[chosen])).max() * num_parts <= _AT_HOME * sums.sum():
        return [chosen[home[chosen] == part] for part in range(num_parts)]
    groups = names if unit == "row" else _numbered(names[first])[units]
    is_whole = groups.max() + 1 >= num_parts
    parts = divided(groups if is_whole else units)
    sums = costs(parts)
    if is_whole and sums.max() * num_parts > _EVEN * sums.sum():  # dividing single rows takes half a kilobyte a row
        parted = divided(units)
        parts = parted if costs(parted).max() < sums.max() else parts
    return sorted((np.sort(chosen[parts == part]) for part in range(num_parts)), key=lambda rows: int(rows[0]))


def _costs_of_parts(names: np.ndarray, prompts: np.ndarray, responses: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """The costs of the responses of each part, and once of each prompt in a part, for rows of prompts with `names`."""
    keys = parts * np.int64(len(names)) + names
    order = np.argsort(keys, kind="stable")
    prompt_costs = np.maximum.reduceat(prompts[order], starts := np.flatnonzero(np.diff(keys[order], prepend=-1)))
    return np.bincount(parts, responses) + np.bincount(parts[order[starts]], prompt_costs)


def _numbered(values: np.ndarray) -> np.ndarray:
    """Values as numbers from 0, in the order of their first appearance."""
    _, first, numbers = np.unique(values, return_index=True, return_inverse=True)
    order = np.empty(len(first), np.int32)
    order[np.argsort(first)] = np.arange(len(first))
    return order.take(numbers)


def _lengths(batch: DataProto) -> tuple[np.ndarray, np.ndarray]:
    """Prompt tokens and all tokens of each row; a batch without masks has rows of equal length."""
    names, none = set() if batch.batch is None else set(batch.batch.keys()), np.zeros(len(batch), np.int32)
    if "attention_mask" not in names:
        return none, none + 1
    total = batch.batch["attention_mask"].sum(dim=1).cpu().numpy()
    return batch.batch["prompt_mask"].sum(dim=1).cpu().numpy() if "prompt_mask" in names else none, total


def _prompt_names(batch: DataProto) -> np.ndarray:
    """A number for each row, equal for rows of one prompt: by the ordinal or the uid; else every row is its own."""
    if batch.batch is not None and "ordinal" in batch.batch.keys():
        return batch.batch["ordinal"].cpu().numpy()  # type: ignore[no-any-return]
    return np.array(unit_ids(batch, "uid" if "uid" in batch.non_tensor_batch else "row"))
