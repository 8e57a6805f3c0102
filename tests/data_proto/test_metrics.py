import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.data_proto.metrics import Metric, merge_metrics, metric_values


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([Metric.mean(2.0, weight=3), Metric.mean(6.0, weight=1)], 3.0),
        ([Metric.sum(2.0), Metric.sum(5.0)], 7.0),
        ([Metric.max(2.0), Metric.max(5.0), Metric.max(3.0)], 5.0),
        ([Metric.min(2.0), Metric.min(5.0)], 2.0),
        ([Metric.last(2.0), Metric.last(5.0)], 5.0),
        ([Metric.at_largest(2.0, 7), Metric.at_largest(5.0, 9), Metric.at_largest(4.0, 8)], 5.0),
    ],
)
def test_each_reduction(parts, expected):
    merged = merge_metrics([{"x": p} for p in parts])
    assert metric_values(merged) == {"x": expected}


@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(1, 50)), min_size=1, max_size=8), st.data())
@settings(max_examples=30, deadline=None)
def test_mean_does_not_depend_on_the_split(items, data):
    """Merging any grouping of the parts gives the mean over all items."""
    cut = data.draw(st.integers(0, len(items)))
    parts = [{"x": Metric.mean(v, w)} for v, w in items]
    halves = [merge_metrics(p) for p in (parts[:cut], parts[cut:]) if p]
    exact = sum(v * w for v, w in items) / sum(w for _, w in items)
    assert math.isclose(merge_metrics(halves)["x"].value, exact, abs_tol=1e-9)


def test_tensors_are_read_late_and_carry_no_graph():
    weight = torch.ones(3, requires_grad=True)
    metric = Metric.mean((weight * 2).mean(), weight=torch.tensor(4))
    ((value, _),) = metric.observations
    assert isinstance(value, torch.Tensor)
    assert not value.requires_grad
    assert metric.merge(Metric.mean(4.0, weight=4)).value == 3.0


def test_nan_shows_and_empty_parts_count_for_nothing():
    assert Metric.mean(float("nan"), weight=0).merge(Metric.mean(1.5, weight=2)).value == 1.5
    assert math.isnan(Metric.mean(0.0, weight=0).value)
    for first, second in ((float("nan"), 1.0), (1.0, float("nan"))):
        assert math.isnan(Metric.max(first).merge(Metric.max(second)).value)
        assert math.isnan(Metric.min(first).merge(Metric.min(second)).value)


def test_different_reductions_do_not_merge():
    with pytest.raises(ValueError, match="'loss'.*sum.*mean"):
        merge_metrics([{"loss": Metric.sum(1)}, {"loss": Metric.mean(1)}])


def test_names_of_some_parts_only_stay():
    merged = merge_metrics([{"a": Metric.sum(1)}, {"b": Metric.sum(2)}, {}])
    assert metric_values(merged) == {"a": 1.0, "b": 2.0}
