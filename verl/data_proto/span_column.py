"""Rows with one value on one span of tokens and 0 elsewhere, as a tensor that holds three numbers a row.

Masks are such tensors, and scores on the last token, advantages of responses, versions of weights:

    mask = SpanColumn(RowSpans(np.ones(2, bool), starts=np.array([0, 0]), stops=np.array([3, 1])), width=4)
    mask.tolist()       # [[True, True, True, False], [True, False, False, False]]
    mask.sum(dim=1)     # computed from three numbers a row; operations without such a form make the values

A process that answers a call on Ray sends such tensors in this form (verl/parallel/serialize.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import torch

from verl.data_proto.stored_column import LazyColumn, dtype_of

_aten = torch.ops.aten
_ROWS = 64  # as many values stay in the cache


class RowSpans(NamedTuple):
    """`values` [rows] at the places `starts` to `stops` [rows] of each row."""

    values: np.ndarray
    starts: np.ndarray
    stops: np.ndarray

    def of_rows(self, rows: slice | np.ndarray) -> RowSpans:
        return RowSpans(self.values[rows], self.starts[rows], self.stops[rows])


class SpanColumn(LazyColumn):
    """[rows, `width`]: the value of each of `spans` on its tokens, and 0 elsewhere."""

    spans: RowSpans

    @staticmethod
    def __new__(cls, spans: RowSpans, width: int, is_view: bool = False) -> SpanColumn:
        column = cls._of((len(spans.values), width), dtype_of(spans.values), is_view)
        column.spans = RowSpans(*map(_once, spans))
        return column

    def copied(self) -> torch.Tensor:
        return torch.from_numpy(self._read_values()) if self.is_stored else super().copied()

    def row_arrays(self, lengths: Sequence[int] | None) -> Sequence[np.ndarray]:
        """A row of one value takes the memory of one number."""
        ends = [self.shape[1]] * len(self) if lengths is None else lengths
        rows = zip(ends, self.spans.values, *(part.tolist() for part in self.spans[1:]), strict=True)
        return [_row(value, start, stop, end) for end, value, start, stop in rows]

    def is_known_finite(self) -> bool:
        return bool(np.isfinite(self.spans.values).all())

    def _read_values(self) -> np.ndarray:
        values = np.zeros(self.shape, self.spans.values.dtype)
        for row, value, start, stop in zip(values, *(part.tolist() for part in self.spans), strict=True):
            row[start:stop] = value
        return values


def _once(numbers: np.ndarray) -> np.ndarray:
    """Equal numbers, such as the starts of all responses, in the memory of one. Compares bits."""
    if len(numbers) < 2 or numbers.strides == (0,):
        return numbers
    bits = numbers.view(f"u{numbers.itemsize}")
    is_one = bits[0] == bits[-1] and (bits == bits[0]).all()
    return np.broadcast_to(numbers[:1].copy(), len(bits)) if is_one else numbers


def _row(value: np.generic, start: int, stop: int, end: int) -> np.ndarray:
    if start == 0 and stop >= end:
        return np.broadcast_to(value, end)
    row = np.zeros(end, value.dtype)
    row[start:stop] = value
    return row


def row_spans(array: np.ndarray) -> RowSpans | None:
    """The spans of `array` [rows, width]; None for one with other rows. Compares bits: -0.0 is no 0."""
    if len(array) > 1 and row_spans(array[:1]) is None:  # most tensors
        return None
    parts, width = [], array.shape[1]
    bits = array.view(f"u{array.itemsize}")
    for block in (bits[at : at + _ROWS] for at in range(0, len(array), _ROWS)):
        is_set = block != 0
        starts, counts = is_set.argmax(axis=1), np.count_nonzero(is_set, axis=1)
        values = block[np.arange(len(block)), starts]
        stops = np.where(counts, width - is_set[:, ::-1].argmax(axis=1), 0)
        if (stops - starts != counts).any() or (
            np.count_nonzero(is_set & (block == values[:, None]), axis=1) != counts
        ).any():
            return None
        parts.append((values, starts, stops))
    values, starts, stops = map(np.concatenate, zip(*parts, strict=True))
    return RowSpans(values.view(array.dtype), starts.astype(np.int32), stops.astype(np.int32))


def sums_of_rows(column: torch.Tensor) -> np.ndarray:
    """float64 [batch]: the sum of each row."""
    if isinstance(column, SpanColumn) and column.is_stored and (sums := _sum(column, [1])) is not None:
        return sums.numpy().astype(np.float64)
    return cast("np.ndarray", column.numpy().sum(axis=1, dtype="float64"))


def _chosen(column: SpanColumn, rows: slice | np.ndarray, is_view: bool = False) -> SpanColumn:
    return SpanColumn(column.spans.of_rows(rows), column.shape[1], is_view)


def _slice(
    column: SpanColumn, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> torch.Tensor | None:
    if not column.is_stored or dim not in (0, 1, -1) or (dim and step != 1):
        return None
    if dim == 0:
        return _chosen(column, slice(start, end, step), is_view=True)
    first, last, _ = slice(start, end).indices(column.shape[1])
    width = max(last - first, 0)
    values, starts, stops = column.spans
    return SpanColumn(
        RowSpans(values, (starts - first).clip(0, width), (stops - first).clip(0, width)), width, is_view=True
    )


def _index(column: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    (index, *further) = indices
    if further or index is None or not isinstance(column, SpanColumn) or not column.is_stored:
        return None
    if index.ndim == 1 and (index.dtype != torch.bool or len(index) == len(column)):
        return _chosen(column, index.numpy())
    if (
        not isinstance(index, SpanColumn)
        or not index.is_stored
        or index.shape != column.shape
        or index.dtype != torch.bool
    ):
        return None
    # the tokens of the mask before, on and after the span
    (values, *places), (chosen, *ends) = column.spans, index.spans
    begin, end = (np.where(chosen, place, 0) for place in ends)
    edges = [begin, *(place.clip(begin, end) for place in places), end]
    none = np.zeros_like(values)
    numbers = np.stack([none, values, none], axis=1)
    return torch.from_numpy(np.repeat(numbers.reshape(-1), np.diff(np.stack(edges, axis=1)).reshape(-1)))


def _select(column: SpanColumn, dim: int, index: int) -> torch.Tensor | None:
    if dim != 0 or not column.is_stored:
        return None
    return torch.from_numpy(_chosen(column, np.array([index])).numpy()[0].copy())


def _cat(columns: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor | None:
    spans = [column.spans for column in columns if isinstance(column, SpanColumn) and column.is_stored]
    if dim != 0 or len(spans) != len(columns) or len({(c.shape[1:], c.dtype) for c in columns}) > 1:
        return None
    return SpanColumn(RowSpans(*map(np.concatenate, zip(*spans, strict=True))), columns[0].shape[1])


def _same(column: SpanColumn, is_view: bool = False) -> torch.Tensor | None:
    return SpanColumn(column.spans, column.shape[1], is_view) if column.is_stored else None


def _sum(column: SpanColumn, dims: Sequence[int] | None, keepdim: bool = False) -> torch.Tensor | None:
    if not column.is_stored or keepdim or dims is None or list(dims) not in ([1], [-1]):
        return None
    values, starts, stops = column.spans
    counts = (stops - starts).astype(np.int64)
    if not column.is_floating_point():
        return torch.from_numpy(counts * values)
    if counts.max(initial=0) > 1:  # in floating point, a sum is not a product
        return None
    return torch.from_numpy(np.where(counts, values, np.zeros_like(values)) + values.dtype.type(0))  # -0.0 + 0 is 0


def _any(column: SpanColumn, dim: int, keepdim: bool = False) -> torch.Tensor | None:
    if not column.is_stored or keepdim or dim not in (1, -1):
        return None
    values, starts, stops = column.spans
    return torch.from_numpy((starts < stops) & (values != 0))


def _unequal(column: SpanColumn, other: object) -> torch.Tensor | None:
    if not column.is_stored or other != 0:
        return None
    return SpanColumn(column.spans._replace(values=column.spans.values != 0), column.shape[1])


def _both(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    width = max(0, *a.shape[1:], *b.shape[1:])
    spans = [_spans_of_mask(mask, len(a), width) for mask in (a, b)]
    if spans[0] is None or spans[1] is None:
        return None
    (values, starts, stops), (values_again, *places) = spans[0], spans[1]
    begin = np.maximum(starts, places[0])
    return SpanColumn(RowSpans(values & values_again, begin, np.minimum(stops, places[1]).clip(begin)), width)


def _spans_of_mask(mask: torch.Tensor, num_rows: int, width: int) -> RowSpans | None:
    """Of a mask [rows, width] or [rows, 1]; None for another tensor, and if the places of ones are not known."""
    if mask.dtype != torch.bool or mask.ndim != 2 or len(mask) != num_rows:
        return None
    if isinstance(mask, SpanColumn) and mask.is_stored and mask.shape[1] == width:
        return mask.spans
    zeros = np.zeros(num_rows, np.int32)
    return RowSpans(mask.numpy()[:, 0].copy(), zeros, zeros + width) if mask.shape[1] == 1 else None


def _where(mask: torch.Tensor, values: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    """Values [rows, 1] on the tokens of a mask, and 0 elsewhere."""
    is_real = values.dtype in (torch.float32, torch.float64)
    if not isinstance(mask, SpanColumn) or values.shape != (len(mask), 1) or not is_real:
        return None
    if not mask.is_stored or other.ndim or other != 0:
        return None
    chosen, starts, stops = mask.spans
    numbers = values.detach().numpy()[:, 0].copy()
    return SpanColumn(RowSpans(numbers, starts, np.where(chosen, stops, starts)), mask.shape[1])


SpanColumn.row_ops = {
    _aten.slice.Tensor: _slice,
    _aten.index.Tensor: _index,
    _aten.select.int: _select,
    _aten.cat.default: _cat,
    _aten.clone.default: _same,
    _aten.alias.default: lambda column: _same(column, is_view=True),  # a slice of all rows
    _aten.detach.default: lambda column: _same(column, is_view=True),
    _aten.sum.dim_IntList: _sum,
    _aten.any.dim: _any,
    _aten.ne.Scalar: _unequal,
    _aten.bitwise_and.Tensor: _both,
    _aten.mul.Tensor: _both,
    _aten.where.self: _where,
}
