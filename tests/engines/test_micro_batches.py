"""Division of a mini-batch into micro-batches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models.reference import make_columns, random_rows
from verl.engines.api import MicroBatching
from verl.engines.micro_batches import plan_micro_batches
from verl.models.packing import PackedRow as Row
from verl.models.packing import num_computed, pack_rows, unpadded_rows

pytestmark = pytest.mark.seed("B9")


def rows_of(*specification):
    """(prompt, response inputs) of each row."""
    return [Row(i, tuple(prompt), inputs, True) for i, (prompt, inputs) in enumerate(specification)]


def test_rows_of_a_prompt_stay_together_while_they_fit():
    rows = rows_of(([1] * 10, 5), ([2] * 10, 5), ([1] * 10, 5), ([2] * 10, 5))
    assert plan_micro_batches(rows, MicroBatching(max_tokens=20), True) == [[0, 2], [1, 3]]
    assert plan_micro_batches(rows, MicroBatching(max_tokens=40), True) == [[0, 1, 2, 3]]
    assert plan_micro_batches(rows, MicroBatching(max_tokens=30), False) == [[0, 1], [2, 3]]


def test_a_group_that_does_not_fit_is_cut():
    rows = rows_of(*[([1] * 10, 5)] * 5)
    assert plan_micro_batches(rows, MicroBatching(max_tokens=20), True) == [[0, 1], [2, 3], [4]]


def test_by_rows_in_their_order():
    rows = rows_of(*[([i], 3) for i in range(5)])
    assert plan_micro_batches(rows, MicroBatching(max_rows=2), True) == [[0, 1], [2, 3], [4]]
    assert plan_micro_batches(rows, MicroBatching(), True) == [[0, 1, 2, 3, 4]]


def test_there_is_always_a_micro_batch():
    assert plan_micro_batches([], MicroBatching(max_rows=2), True) == [[]]
    assert plan_micro_batches([], MicroBatching(max_tokens=5), True) == [[]]


def test_only_chosen_rows_are_planned():
    columns = make_columns(*random_rows(3, [2, 3]))
    rows = unpadded_rows(columns, [1, 4])
    assert rows == [row for row in unpadded_rows(columns) if row.index in (1, 4)]
    assert plan_micro_batches(rows, MicroBatching(max_rows=1), True) == [[1], [4]]
    assert plan_micro_batches(rows, MicroBatching(max_tokens=10**6), True) == [[1, 4]]


def test_rows_that_do_not_train_ride_along():
    rows = [Row(0, (1,), 0, False), *[Row(i, (i,), 4, True) for i in (1, 2)]]
    assert plan_micro_batches(rows, MicroBatching(max_tokens=5), True) == [[0, 1], [2]]
    assert plan_micro_batches(rows[:1], MicroBatching(max_tokens=5), True) == [[0]]


def test_rows_of_a_unit_stay_together():
    rows = rows_of(([1] * 10, 5), ([1] * 10, 5), ([2] * 10, 5), ([3] * 10, 5))
    pairs = [0, 0, 2, 2]
    assert plan_micro_batches(rows, MicroBatching(max_tokens=20), True, pairs) == [[0, 1], [2, 3]]
    assert plan_micro_batches(rows, MicroBatching(max_tokens=1), True, pairs) == [
        [0, 1],
        [2, 3],
    ]  # above the limit: by itself
    assert plan_micro_batches(rows, MicroBatching(max_tokens=50), True, pairs) == [[0, 1, 2, 3]]
    assert plan_micro_batches(rows, MicroBatching(max_rows=1), True, pairs) == [[0, 1], [2, 3]]
    assert plan_micro_batches(rows, MicroBatching(max_rows=3), True, [0, 1, 0, 1]) == [[0, 2], [1, 3]]


def test_pairs_of_a_prompt_compute_it_once_as_far_as_they_fit():
    rows = rows_of(*[([1] * 10, 5)] * 6)
    assert plan_micro_batches(rows, MicroBatching(max_tokens=30), True, [0, 0, 2, 2, 4, 4]) == [[0, 1, 2, 3], [4, 5]]


def test_a_row_that_does_not_train_stays_with_its_unit():
    rows = [Row(0, (1,), 4, True), Row(1, (2,), 4, True), Row(2, (2,), 0, False), Row(3, (5,), 0, False)]
    assert plan_micro_batches(rows, MicroBatching(max_tokens=5), True, [0, 1, 1, 3]) == [[0, 3], [1, 2]]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(1, 60), st.integers(0, 999), st.data())
def test_no_unit_is_cut(sizes, limit, seed, data):
    rows = unpadded_rows(make_columns(*random_rows(seed, sizes)))
    units = data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)))
    for micro in (MicroBatching(max_tokens=limit), MicroBatching(max_rows=limit)):
        plan = plan_micro_batches(rows, micro, True, units)
        assert sorted(row for part in plan for row in part) == list(range(len(rows)))
        assert len({units[row] for row in range(len(rows))}) == sum(len({units[row] for row in part}) for part in plan)
        for part in plan:
            size = len(part) if micro.max_rows else num_computed([rows[i] for i in part])
            assert size <= limit or len({units[row] for row in part}) == 1


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(1, 60), st.booleans(), st.integers(0, 999))
def test_every_row_once_and_no_limit_passed(sizes, limit, share, seed):
    columns = make_columns(*random_rows(seed, sizes))
    rows = unpadded_rows(columns)
    plan = plan_micro_batches(rows, MicroBatching(max_tokens=limit), share)
    assert sorted(row for part in plan for row in part) == list(range(len(rows)))
    for part in plan:
        computed = num_computed([rows[i] for i in part], share)
        assert computed <= limit or len(part) == 1
        assert computed == pack_rows({k: v[part] for k, v in columns.items()}, share_prompts=share).num_tokens
