"""Monitors of verl/algorithms/monitors.py on numbers worked by hand."""

import math

import pytest
import torch

from verl.algorithms import monitors
from verl.config.sections.trainer import GuardConfig, GuardsConfig
from verl.data_proto.metrics import merge_metrics

MASK = torch.tensor([[True, True], [True, False], [False, False]])
LOG_PROB = torch.tensor([[-1.0, -2.0], [-0.5, 9.0], [9.0, 9.0]])
OLD = torch.tensor([[-1.0, -1.0], [-2.0, -9.0], [-9.0, -9.0]])
INPUTS = {"log_prob": LOG_PROB, "old": OLD, "reference": OLD, "sampler": OLD, "entropy": -LOG_PROB}


def k3(d):
    """exp(-d) - 1 + d, of KL(p || q) with d = log p - log q."""
    return math.exp(-d) - 1 + d


# sign -> (value of the batch, values of rows 0 and 1)
EXPECTED = {
    "policy_kl": ((k3(1.0) + k3(-1.5)) / 3, (k3(1.0) / 2, k3(-1.5))),
    "reference_kl": ((k3(-1.0) + k3(1.5)) / 3, (k3(-1.0) / 2, k3(1.5))),
    "ratio": (math.exp(1.5), (math.exp(1.0), math.exp(1.5))),
    "entropy": ((1 + 2 + 0.5) / 3, (1.5, 0.5)),
    "sampler_kl": ((k3(1.0) + k3(-1.5)) / 3, (k3(1.0) / 2, k3(-1.5))),
    "mismatch": (math.exp(-0.5) - math.exp(-2), (math.exp(-1) - math.exp(-2), math.exp(-0.5) - math.exp(-2))),
}


@pytest.mark.parametrize("name", list(monitors.MONITORS))
def test_signs_by_hand(name):
    values = monitors.monitor_tokens([name], INPUTS)[name]
    batch, rows = EXPECTED[name]
    assert monitors.monitor_metric(name, values, MASK).value == pytest.approx(batch, rel=1e-6)
    assert monitors.monitor_rows(name, values, MASK)[:2].tolist() == pytest.approx(rows, rel=1e-6)
    # one row after the other comes to the same
    parts = [{name: monitors.monitor_metric(name, values[i : i + 1], MASK[i : i + 1])} for i in range(3)]
    assert merge_metrics(parts)[name].value == pytest.approx(batch, rel=1e-6)


def test_signs_without_their_inputs_are_left_out():
    assert set(
        monitors.monitor_tokens([*monitors.MONITORS, "grad_norm"], {"log_prob": LOG_PROB, "entropy": None, "old": OLD})
    ) == {"policy_kl", "ratio"}


@pytest.mark.parametrize(
    ("name", "value", "limit", "expected"),
    [
        ("grad_norm", 2.0, 1.0, True),
        ("grad_norm", 1.0, 1.0, False),
        ("entropy", 0.1, 0.2, True),
        ("entropy", 0.3, 0.2, False),
        ("ratio", math.inf, 2.0, True),
        ("entropy", math.nan, 0.2, True),
        ("policy_kl", math.nan, 0.2, True),
    ],
)
def test_what_breaks_a_limit(name, value, limit, expected):
    assert monitors.breaks(name, value, limit) is expected


def test_the_worst_rows_come_first_and_one_is_named_at_least():
    rows = torch.tensor([0.1, 3.0, 2.0, math.nan])
    assert monitors.worst_rows("ratio", rows, 1.5) == ([3, 1, 2], 3)
    assert monitors.worst_rows("ratio", rows[:3], 9.0) == ([1], 1)
    assert monitors.worst_rows("entropy", rows[:3], 0.5) == ([0], 1)
    assert monitors.worst_rows("ratio", torch.arange(100.0), -1.0)[1] == 100
    assert len(monitors.worst_rows("ratio", torch.arange(100.0), -1.0)[0]) == 16
    assert monitors.worst_rows("ratio", torch.zeros(0), 1.0) == ([], 0)


def test_rows_that_are_not_finite():
    values = torch.tensor([[1.0, math.nan], [math.inf, 1.0], [1.0, 1.0]])
    assert monitors.nonfinite_rows(values).tolist() == [True, True, False]
    assert monitors.nonfinite_rows(values, torch.tensor([[True, False]] * 3)).tolist() == [False, True, False]
    assert monitors.first_nonfinite(values[1]) == math.inf


def test_limits_are_those_that_are_set():
    config = GuardsConfig(ratio=GuardConfig(limit=3), grad_norm=GuardConfig(limit=1.5))
    assert monitors.limits_of(config) == {"ratio": 3.0, "grad_norm": 1.5}
    assert monitors.limits_of(GuardsConfig()) == {}
