"""A StoredColumn and a SpanColumn compute what an ordinary tensor of their values does. A write never reaches the store, and
the masks and scores of a batch take the form of spans."""

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch

from verl.algorithms.masked import broadcast_true
from verl.data_proto.batch_metrics import any_true, chosen_values, count_true
from verl.data_proto.proto import DataProto
from verl.data_proto.span_column import SpanColumn, row_spans, sums_of_rows
from verl.data_proto.stored_column import StoredArray, StoredColumn, copied, is_finite, row_arrays
from verl.programs.rollout_queue import _replace_rows

ROWS = torch.tensor([5, 0, 0, 7, 3])


def stored(num_rows: int = 4, parts: int = 2, dtype: type = np.float32) -> StoredColumn:
    """[parts * num_rows, 3], of arrays that refuse writes."""
    arrays = [np.arange(i * 100, i * 100 + 3 * num_rows, dtype=dtype).reshape(num_rows, 3) for i in range(parts)]
    for array in arrays:
        array.flags.writeable = False
    return torch.cat([StoredColumn((StoredArray(object(), 0, array),)) for array in arrays])


STAY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "slice": lambda x: x[2:6],
    "all rows": lambda x: x[0:8],
    "from the end": lambda x: x[-3:-1],
    "every second row": lambda x: x[::2],
    "indices": lambda x: x[ROWS],
    "indices of indices": lambda x: x[ROWS][torch.tensor([4, 1])],
    "mask": lambda x: x[torch.arange(8) % 3 == 0],
    "no rows": lambda x: x[4:4],
    "cat": lambda x: torch.cat([x[6:], x[ROWS], x[:2]]),
    "cat with itself": lambda x: torch.cat([x, x])[torch.tensor([9, 1])],
    "clone": lambda x: x.clone(),
    "batch": lambda x: DataProto.from_dict({"x": x}).repeat(2).chunk(4)[1].union(DataProto()).batch["x"],
}
READ: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "row": lambda x: x[5],
    "last row": lambda x: x[ROWS][-1],
    "value": lambda x: x[1, 2],
    "columns": lambda x: x[:, 1:],
    "sum": lambda x: x.sum(dim=1),
    "two of them": lambda x: x * x[torch.arange(7, -1, -1)],
    "cat with a tensor": lambda x: torch.cat([x, torch.zeros(1, 3)]),
    "cat of columns": lambda x: torch.cat([x, x], dim=1),
    "where": lambda x: torch.where(x > 100, x, torch.zeros(())),
    "numpy": lambda x: torch.tensor(x[ROWS].numpy()),
    "array": lambda x: torch.tensor(np.asarray(x)),
    "list": lambda x: torch.tensor(x.tolist()),
    "arrays of rows": lambda x: torch.tensor(np.stack(row_arrays(x[ROWS]))),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "deepcopy": copy.deepcopy,
    "rows in turn": lambda x: torch.stack(list(x)),
    "added in place": lambda x: x.add_(1),
    "assigned": lambda x: x.index_fill_(0, torch.tensor([1]), 7).clone(),
    "view": lambda x: x.view(-1),
}


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("name", [*STAY, *READ])
def test_equals_a_tensor(name: str, parts: int) -> None:
    operation, column = {**STAY, **READ}[name], stored(8 // parts, parts)
    expected = operation(column.copied())
    result = operation(column)
    assert isinstance(result, StoredColumn) == (name in STAY or name == "added in place")
    assert result.dtype == expected.dtype
    assert torch.equal(copied(result), expected)


def test_rows_release_parts_that_they_do_not_need() -> None:
    column = stored(2, parts=4)
    assert len(column[3:5].parts) == 2
    assert len(column[torch.tensor([7, 0, 7])].parts) == 2
    assert column[torch.tensor([7, 0, 7])].tolist() == column.copied()[[7, 0, 7]].tolist()


def test_a_write_stays_in_a_copy() -> None:
    column = stored()
    before, other = column.copied(), column.clone()
    column[column > 100] = -1.0
    assert not column.is_stored
    assert torch.equal(column.copied(), before.where(before <= 100, -1.0))
    column[1:3] = 5.0
    assert column[1:3].tolist() == [[5.0] * 3] * 2
    assert torch.equal(other.copied(), before)
    other.view(-1)[0] = 9.0
    assert torch.equal(other.copied(), before)


@pytest.mark.parametrize("extended", [torch.full((2, 3), 9.0), stored()[2:4]], ids=["a tensor", "stored"])
def test_resumed_rows_of_a_slice(extended: torch.Tensor) -> None:
    expected, rows = stored().copied(), DataProto.from_dict({"x": stored()}).slice(0, 8)
    assert rows.batch["x"].data_ptr() == rows.batch["x"].data_ptr()  # of values that are kept
    expected[[1, 6]] = copied(extended)
    _replace_rows(rows, np.array([1, 6]), DataProto.from_dict({"x": extended}))
    assert torch.equal(copied(rows.batch["x"]), expected)


def test_an_operation_with_out_writes_to_the_column() -> None:
    column = stored()
    before = column.copied()
    torch.add(before, 1.0, out=column)
    assert torch.equal(column.copied(), before + 1.0)


def test_a_write_to_some_rows_of_a_column_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Write to a clone"):
        stored()[1:3].zero_()


def test_an_array_of_the_store_refuses_writes() -> None:
    with pytest.raises(ValueError, match="read-only"):
        stored(parts=1).numpy()[0] = 1.0


MASK = torch.arange(6) < torch.tensor([[4], [6], [0], [1]])
SCORES = torch.zeros(4, 6).index_put_(
    (torch.arange(4), torch.tensor([3, 5, 0, 0])), torch.tensor([0.5, -1.0, -0.0, 2.0])
)
VERSIONS = torch.where(MASK, torch.tensor([[3], [2], [1], [0]]), 0)
CREDIT = torch.where(MASK, torch.tensor([[0.5], [0.0], [1.0], [-2.0]]), 0.0)
SCORED = torch.tensor([True, False, True, True])


def column(values: torch.Tensor) -> SpanColumn:
    spans = row_spans(values.numpy())
    assert spans is not None
    return SpanColumn(spans, values.shape[1])


STAY_SPANS: dict[str, Callable[..., torch.Tensor]] = {
    "rows": lambda x: x[1:3],
    "every second row": lambda x: x[::2],
    "tokens": lambda x: x[:, 2:5],
    "last tokens": lambda x: x[:, -5:],
    "no tokens": lambda x: x[:, 4:2],
    "indices": lambda x: x[torch.tensor([3, 0, 0])],
    "mask of rows": lambda x: x[SCORED],
    "cat": lambda x: torch.cat([x, x[2:]]),
    "clone": lambda x: x.clone(),
    "unequal": lambda x: x != 0,
}
COMPUTE: dict[str, Callable[..., torch.Tensor]] = {
    "row": lambda x: x[1],
    "sum": lambda x: x.sum(dim=1),
    "any": lambda x: x.any(dim=-1),
    "negative": lambda x: ~(x != 0),
    "product": lambda x: x * torch.tensor(3),
    "cat with a tensor": lambda x: torch.cat([x, torch.ones(1, 6, dtype=x.dtype)]),
    "where it holds": lambda x: chosen_values(x, column(MASK) if isinstance(x, SpanColumn) else MASK),
    "where another holds": lambda x: x[column(MASK[[1, 0, 3, 2]]) if isinstance(x, SpanColumn) else MASK[[1, 0, 3, 2]]],
    "sums in float64": lambda x: torch.from_numpy(sums_of_rows(x)),
    "arrays of rows": lambda x: torch.tensor(np.concatenate(row_arrays(x))),
    "written": lambda x: x.clone().index_fill_(0, torch.tensor([1]), 1),
}
OF_MASKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "scored rows": lambda m: m & SCORED[:, None],
    "product with rows": lambda m: m * SCORED[:, None],
    "two masks": lambda m: m & m[torch.tensor([1, 0, 3, 2])],
    "credit": lambda m: broadcast_true(m, torch.tensor([0.5, -0.0, 1.0, float("nan")])),
    "credit of scored rows": lambda m: broadcast_true(m & SCORED[:, None], torch.arange(4.0)),
}


@pytest.mark.parametrize("values", [MASK, SCORES, VERSIONS, CREDIT], ids=["mask", "scores", "versions", "credit"])
@pytest.mark.parametrize("name", [*STAY_SPANS, *COMPUTE])
def test_spans_equal_a_tensor(name: str, values: torch.Tensor) -> None:
    operation = {**STAY_SPANS, **COMPUTE}[name]
    result, expected = operation(column(values)), operation(values.clone())
    assert isinstance(result, SpanColumn) == (name in STAY_SPANS or name == "written")
    assert result.dtype == expected.dtype
    assert copied(result).numpy().tobytes() == expected.numpy().tobytes()


@pytest.mark.parametrize("name", OF_MASKS)
def test_masks_choose_without_values(name: str) -> None:
    result, expected = OF_MASKS[name](column(MASK)), OF_MASKS[name](MASK)
    assert isinstance(result, SpanColumn)
    assert copied(result).numpy().tobytes() == expected.contiguous().numpy().tobytes()
    assert any_true(result).tolist() == any_true(expected).tolist()


def test_lengths_and_rows_of_a_mask() -> None:
    assert count_true(column(MASK), slice(-3, None)).tolist() == [1, 3, 0, 0]
    rows = row_arrays(column(CREDIT), [4, 6, 3, 1])
    assert [row.tolist() for row in rows] == [[0.5] * 4, [0.0] * 6, [0.0] * 3, [-2.0]]
    assert rows[0].strides == (0,)


def test_values_that_are_not_finite() -> None:
    assert is_finite(column(SCORES))
    assert not is_finite(column(torch.where(MASK, torch.tensor(float("inf")), 0.0)))


def test_other_rows_have_no_spans() -> None:
    assert row_spans(np.array([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]], np.float32)) is None
    assert row_spans(np.array([[1.0, 2.0, 0.0]], np.float32)) is None
    assert row_spans(np.array([[1.0, -0.0, 0.0]], np.float32)) is None
