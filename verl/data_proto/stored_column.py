"""Rows of arrays that are in a store of several processes, as a tensor: rows are chosen and joined by their numbers, and
values are read when something computes with them.

    part = StoredArray(reference, 3, array)                         # what a rank has answered, in the store
    column = torch.cat([StoredColumn((part,)), StoredColumn((other,))])[rows]      # nothing is copied
    column.sum(dim=1)                                               # reads

A call sends the references and row numbers in place of values (verl/parallel/serialize.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar, SupportsIndex, TypeVar, cast

import numpy as np
import torch
from torch.utils._pytree import tree_map

_aten = torch.ops.aten
Value = TypeVar("Value")
Column = TypeVar("Column", bound="LazyColumn")


@dataclass(frozen=True, eq=False)
class StoredArray:
    """Buffer `number` of the object `reference` in the store. `array` is a view of it that refuses writes; `is_finite`: it is
    known to have neither NaN nor infinities."""

    reference: object
    number: int
    array: np.ndarray
    is_finite: bool = False


class LazyColumn(torch.Tensor):
    """A tensor [rows, ...] that makes its values when something computes with them.

    Operations of `row_ops` make another column without its values; other operations return ordinary tensors. A write turns the
    column into a copy. Raises RuntimeError for a write to a slice: it would not reach its column.
    """

    # by operation; None: this call computes with values
    row_ops: ClassVar[dict[object, Callable[..., torch.Tensor | list[torch.Tensor] | None]]] = {}
    _copy: torch.Tensor | None  # after a write
    _is_slice: bool

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def _of(cls: type[Column], shape: Sequence[int], dtype: torch.dtype, is_view: bool) -> Column:
        column: Column = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=torch.device("cpu"))
        column._copy, column._is_slice = None, is_view
        return column

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        if func in cls.row_ops and not kwargs and (column := cls.row_ops[func](*args)) is not None:
            return column
        target = (kwargs or {}).get("out", args[0] if args else None)
        written = target if func._schema.is_mutable and isinstance(target, LazyColumn) else None
        if written is not None:
            written._be_a_copy()
        # what shares memory with its argument may be written to
        shares = any(value.alias_info is not None for value in func._schema.returns)

        def read(value: object) -> object:
            if not isinstance(value, LazyColumn):
                return value
            return value.copied() if shares and value.is_stored else value._tensor()

        result = func(*tree_map(read, args), **tree_map(read, dict(kwargs or {})))
        return result if written is None else written

    @property
    def is_stored(self) -> bool:
        """Whether the column is still without values of its own."""
        return self._copy is None

    def copied(self) -> torch.Tensor:
        """The values in memory of this process."""
        return self._tensor().clone()

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """The values, in an array that refuses writes: they would not reach the column."""
        if self._copy is not None:
            return self._copy.numpy()
        values = self._read_values()
        values.setflags(write=False)
        return values

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.numpy(), dtype=dtype, copy=bool(copy) or dtype is not None)

    def tolist(self) -> list[Any]:
        return cast("list[Any]", self.numpy().tolist())

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        return cast("str | tuple[Any, ...]", self.copied().__reduce_ex__(protocol))

    def __deepcopy__(self, memo: object) -> torch.Tensor:
        return self.copied()

    def row_arrays(self, lengths: Sequence[int] | None) -> Sequence[np.ndarray]:
        """The function of this name, of a column without a copy."""
        raise NotImplementedError

    def is_known_finite(self) -> bool:
        """Whether it has neither NaN nor infinities, as far as is known without its values."""
        raise NotImplementedError

    def _read_values(self) -> np.ndarray:
        raise NotImplementedError

    def _tensor(self) -> torch.Tensor:
        return self._copy if self._copy is not None else torch.from_numpy(np.asarray(_Writable(self.numpy())))

    def _be_a_copy(self) -> None:
        if self._is_slice:
            raise RuntimeError(
                "These are some rows of a column without a copy in this process. Write to a clone() of them."
            )
        if self._copy is None:
            self._copy = self.copied()


class StoredColumn(LazyColumn):
    """Rows `rows` of `parts`, counted through all parts; None: all of them. Slices and indices of rows, `cat` of rows
    and `clone` make another StoredColumn."""

    parts: tuple[StoredArray, ...]
    rows: range | np.ndarray
    _read: np.ndarray | None  # of a mask that has been read, or of `keep_values`

    @staticmethod
    def __new__(
        cls, parts: tuple[StoredArray, ...], rows: range | np.ndarray | None = None, is_view: bool = False
    ) -> StoredColumn:
        chosen = range(sum(len(part.array) for part in parts)) if rows is None else rows
        column = cls._of((len(chosen), *parts[0].array.shape[1:]), dtype_of(parts[0].array), is_view)
        column.parts, column.rows, column._read = parts, chosen, None
        return column

    def data_ptr(self) -> int:
        keep_values(self)
        return self.numpy().ctypes.data

    def row_arrays(self, lengths: Sequence[int] | None) -> Sequence[np.ndarray]:
        rows, starts = np.asarray(self.rows), np.cumsum([0, *(len(part.array) for part in self.parts)])
        numbers = np.searchsorted(starts, rows, side="right") - 1
        places = zip(numbers.tolist(), (rows - starts[numbers]).tolist(), strict=True)
        return [self.parts[number].array[row] for number, row in places]

    def is_known_finite(self) -> bool:
        return all(part.is_finite for part in self.parts)

    def _read_values(self) -> np.ndarray:
        values: np.ndarray = joined_rows(self.parts, self.rows) if self._read is None else self._read
        if values.itemsize == 1:
            self._read = values  # masks are read several times
        return values

    def _be_a_copy(self) -> None:
        super()._be_a_copy()
        self.parts, self._read = (), None


class _Writable:
    """Memory that refuses writes, for torch: it has no such tensors. Only operations read it that write elsewhere."""

    def __init__(self, array: np.ndarray):
        self.array = array  # it owns the memory
        self.__array_interface__ = {**array.__array_interface__, "data": (array.__array_interface__["data"][0], False)}


def copied(value: Value) -> Value | torch.Tensor:
    """`value`, or the ordinary tensor of its values if it is a LazyColumn: for functions of users."""
    return value.copied() if isinstance(value, LazyColumn) else value


def keep_values(column: torch.Tensor) -> None:
    """Have a column that several passes read in memory of this process as well."""
    if isinstance(column, StoredColumn) and column.is_stored:
        column._read = column.numpy()


def row_arrays(column: torch.Tensor, lengths: Sequence[int] | None = None) -> Sequence[np.ndarray]:
    """The values of each row, as views or made one by one; at least the first `lengths` of them."""
    return column.row_arrays(lengths) if isinstance(column, LazyColumn) and column.is_stored else list(column.numpy())


def is_finite(column: torch.Tensor) -> bool:
    """Whether the sum is finite; no sum with NaN or infinity is. A rank says so of its arrays, without another pass here."""
    if isinstance(column, LazyColumn) and column.is_stored and column.is_known_finite():
        return True
    return bool(torch.isfinite(column.sum()))


def joined_rows(parts: Sequence[StoredArray], rows: range | np.ndarray) -> np.ndarray:
    """The rows of all parts, counted through them; a view if they are adjacent rows of one part."""
    ends = list(accumulate((len(part.array) for part in parts), initial=0))
    if isinstance(rows, range):
        stops = ((max(rows.start - start, 0), max(rows.stop - start, 0)) for start in ends[:-1])
        blocks = [part.array[a:b] for part, (a, b) in zip(parts, stops, strict=True)]
        used = [block for block in blocks if len(block)]
        return used[0] if len(used) == 1 else np.concatenate(used or blocks)
    if len(parts) == 1:
        return cast("np.ndarray", parts[0].array[rows])
    values = np.empty((len(rows), *parts[0].array.shape[1:]), parts[0].array.dtype)
    for part, (start, end) in zip(parts, pairwise(ends), strict=True):
        places = np.flatnonzero((rows >= start) & (rows < end))
        if len(places) and places[-1] - places[0] + 1 == len(places):  # without a second copy
            block = values[places[0] : places[-1] + 1]
            np.take(part.array, rows[places] - start, axis=0, out=block, mode="clip")
        else:
            values[places] = part.array[rows[places] - start]
    return values


def dtype_of(array: np.ndarray) -> torch.dtype:
    """Torch's name of the dtype."""
    return torch.from_numpy(np.empty(0, array.dtype)).dtype


def _chosen(column: StoredColumn, rows: range | np.ndarray, is_view: bool = False) -> StoredColumn:
    """The column of `rows`, without the parts that they do not need: these can leave the store."""
    parts = column.parts
    if len(parts) > 1 and len(rows):
        starts = np.cumsum([0, *(len(part.array) for part in parts)])
        places = np.array([rows[0], rows[-1]]) if isinstance(rows, range) else rows
        if all(((start <= places) & (places < end)).any() for start, end in pairwise(starts.tolist())):
            return StoredColumn(parts, rows, is_view)
        numbers = np.searchsorted(starts, places, side="right") - 1
        used = np.arange(numbers[0], numbers[-1] + 1) if isinstance(rows, range) else np.unique(numbers)
        lengths = np.array([len(parts[i].array) for i in used])
        moved = starts[used] - (np.cumsum(lengths) - lengths)  # of each used part, towards the start
        if isinstance(rows, range):
            rows = range(rows.start - int(moved[0]), rows.stop - int(moved[0]))
        else:
            rows = rows - moved[np.searchsorted(used, numbers)]
        parts = tuple(parts[i] for i in used)
    return StoredColumn(parts, rows, is_view)


def _slice(
    column: StoredColumn, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> torch.Tensor | None:
    if dim != 0 or not column.is_stored:
        return None
    rows = column.rows if step == 1 else np.asarray(column.rows)
    return _chosen(column, rows[start:end:step], is_view=True)


def _index(column: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    (index, *further) = indices
    if further or index is None or index.ndim != 1 or not isinstance(column, StoredColumn) or not column.is_stored:
        return None
    if index.dtype == torch.bool and len(index) != len(column):
        return None
    return _chosen(column, np.asarray(column.rows, np.int32)[index.numpy()])


def _row(column: StoredColumn, dim: int, index: int) -> torch.Tensor | None:
    if dim != 0 or not column.is_stored:
        return None
    (values,) = joined_rows(column.parts, np.array([column.rows[index]]))
    return torch.tensor(values)


def _cat(columns: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor | None:
    stored = [column for column in columns if isinstance(column, StoredColumn) and column.is_stored]
    if dim != 0 or len(stored) != len(columns) or len({(c.shape[1:], c.dtype) for c in stored}) > 1:
        return None
    starts: dict[tuple[StoredArray, ...], int] = {}
    total, rows = 0, list[range | np.ndarray]()
    for column in stored:
        if column.parts not in starts:
            starts[column.parts], total = total, total + sum(len(part.array) for part in column.parts)
        start, chosen = starts[column.parts], column.rows
        rows.append(range(chosen.start + start, chosen.stop + start) if isinstance(chosen, range) else chosen + start)
    parts = tuple(part for column_parts in starts for part in column_parts)
    ranges = [chosen for chosen in rows if isinstance(chosen, range)]
    if len(ranges) == len(rows) and all(a.stop == b.start for a, b in pairwise(ranges)):
        return StoredColumn(parts, range(ranges[0].start, ranges[-1].stop))
    return StoredColumn(parts, np.concatenate([np.asarray(chosen) for chosen in rows]))


def _same(column: StoredColumn, is_view: bool = False) -> torch.Tensor | None:
    if not column.is_stored:
        return None
    same = StoredColumn(column.parts, column.rows, is_view)
    same._read = column._read
    return same


def blocks(column: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """The parts of torch.split, one at a time: each takes a kilobyte."""
    return (column[at : at + size] for at in range(0, len(column), size))


StoredColumn.row_ops = {
    _aten.slice.Tensor: _slice,
    _aten.index.Tensor: _index,
    _aten.select.int: _row,
    _aten.cat.default: _cat,
    _aten.clone.default: _same,
    _aten.alias.default: lambda column: _same(column, is_view=True),  # a slice of all rows
    _aten.detach.default: lambda column: _same(column, is_view=True),
}
