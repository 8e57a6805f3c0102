"""Losses and measures of reward models against loops over Python floats, and laws of both."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.algorithms.reward_losses import PAIR_LOSSES, calibration_error, correlation, pair_loss, pair_measures
from verl.errors import ConfigError

REFERENCES = {  # (score of the chosen, of the rejected, margin) -> loss
    "sigmoid": lambda w, r, m: math.log1p(math.exp(-(w - r - m))),
    "logexp": lambda w, r, m: math.log(1 + math.exp(r - w)),
}
WON, LOST, MARGIN = ([1.5, -0.2, 0.0, 3.0], [0.5, 0.4, 0.0, -2.0], [0.0, 1.0, 0.0, 2.5])


def tensors(*columns):
    return [torch.tensor(column, dtype=torch.float64) for column in columns]


def test_every_loss_has_a_reference():
    assert set(REFERENCES) == set(PAIR_LOSSES)


@pytest.mark.parametrize("center", [0.0, 0.01])
@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_a_loss_is_its_reference(name, center):
    losses = pair_loss(name, *tensors(WON, LOST, MARGIN), center)
    rows = zip(WON, LOST, MARGIN, strict=True)
    expected = [REFERENCES[name](w, r, m) + center * (w + r) ** 2 for w, r, m in rows]
    assert losses.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_equal_scores_cost_ln_2_and_far_ones_stay_finite(name):
    zero = torch.zeros(1)
    assert float(pair_loss(name, zero, zero, zero)) == pytest.approx(math.log(2))
    far = pair_loss(name, torch.tensor([-1e4]), torch.tensor([1e4]), zero)
    assert float(far) == pytest.approx(2e4)


def test_an_unknown_loss_is_named():
    with pytest.raises(ConfigError, match="sigmoid, logexp"):
        pair_loss("hinge", *tensors(WON, LOST, MARGIN))


def test_calibration_error_by_hand():
    # two bins of confidence: 0.6 (one of two right) and 0.9 (both right)
    logits = torch.tensor([math.log(0.6 / 0.4), -math.log(0.6 / 0.4), math.log(9), -math.log(9)])
    correct = torch.tensor([1.0, 0.0, 1.0, 1.0])
    assert calibration_error(logits, correct) == pytest.approx((2 * 0.1 + 2 * 0.1) / 4)
    assert calibration_error(torch.tensor([1e3, -1e3]), torch.tensor([1.0, 1.0])) == 0.0
    assert math.isnan(calibration_error(torch.zeros(0), torch.zeros(0)))


def test_pair_measures_by_hand():
    lengths = torch.tensor([5, 2, 3, 9]), torch.tensor([4, 4, 3, 1])
    measures = pair_measures(*tensors(WON, LOST), *lengths)
    assert measures["accuracy"] == (1 + 0 + 0.5 + 1) / 4
    assert (measures["accuracy_chosen_longer"], measures["accuracy_chosen_shorter"]) == (1.0, 0.0)
    assert measures["margin"] == pytest.approx((1.0 - 0.6 + 0 + 5) / 4)
    assert (measures["min_reward"], measures["max_reward"]) == (-2.0, 3.0)
    assert measures["length_correlation"] == pytest.approx(np.corrcoef(WON + LOST, [5, 2, 3, 9, 4, 4, 3, 1])[0, 1])


NUMBERS = st.lists(st.floats(-5, 5).map(lambda x: round(x, 3)), min_size=2, max_size=12)


@given(NUMBERS, st.randoms(use_true_random=False))
def test_measures_do_not_depend_on_order_and_swap_with_the_sides(scores, random):
    pairs = list(zip(scores, reversed(scores), range(1, len(scores) + 1), range(len(scores), 0, -1), strict=True))
    measures = pair_measures(*map(torch.tensor, map(list, zip(*pairs, strict=True))))
    random.shuffle(pairs)
    columns = [torch.tensor(list(column)) for column in zip(*pairs, strict=True)]
    assert pair_measures(*columns) == pytest.approx(measures, nan_ok=True, abs=1e-9)
    won, lost, long, short = columns
    swapped = pair_measures(lost, won, short, long)
    assert swapped["accuracy"] == pytest.approx(1 - measures["accuracy"])
    assert swapped["margin"] == pytest.approx(-measures["margin"], abs=1e-9)


@given(NUMBERS)
def test_correlation_is_between_bounds_and_equals_numpys(x):
    y = [value**2 - 3 * value for value in x]
    coefficient = correlation(torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64))
    if np.std(x) > 1e-6 and np.std(y) > 1e-6:
        assert coefficient == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-6)
