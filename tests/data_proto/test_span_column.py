"""A SpanColumn computes what an ordinary tensor of its values does, and the masks and scores of a batch take that form."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from verl.algorithms.masked import broadcast_true
from verl.data_proto.batch_metrics import any_true, chosen_values, count_true
from verl.data_proto.span_column import SpanColumn, row_spans, sums_of_rows
from verl.data_proto.stored_column import copied, is_finite, row_arrays

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


STAY: dict[str, Callable[..., torch.Tensor]] = {
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
@pytest.mark.parametrize("name", [*STAY, *COMPUTE])
def test_equals_a_tensor(name: str, values: torch.Tensor) -> None:
    operation = {**STAY, **COMPUTE}[name]
    result, expected = operation(column(values)), operation(values.clone())
    assert isinstance(result, SpanColumn) == (name in STAY or name == "written")
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
