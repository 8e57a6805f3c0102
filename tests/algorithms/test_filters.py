"""Group filter and PF-PPO."""

import pytest
import torch

from verl.algorithms.filters import filter_groups, pf_ppo_indices
from verl.errors import ConfigError


def test_group_filter():
    uids = ["a", "b", "a", "c", "b", "d", "d"]
    values = [1.0, 0.0, 1.0, 5.0, 1.0, 0.1, 0.1]
    assert filter_groups(values, uids).tolist() == [False, True, False, True, True, False, False]
    assert filter_groups(torch.tensor(values), uids).tolist() == [False, True, False, True, True, False, False]


@pytest.mark.parametrize(
    ("method", "weights"), [("pow", [1, 0, 9, 4]), ("max_min", [1, 0, 1, 0]), ("max_random", [0.1, 0.1, 0.4, 0.1])]
)
def test_pf_ppo(method, weights):
    scores = torch.tensor([-1.0, 0.0, 3.0, 2.0])
    many = scores.repeat(5000)
    rows = pf_ppo_indices(many, method, 2.0, torch.Generator().manual_seed(0))
    assert rows.shape == many.shape
    found = torch.bincount(rows % 4, minlength=4) / len(rows)
    expected = torch.tensor(weights) / sum(weights)
    assert float((found - expected).abs().max()) < 0.02
    again = pf_ppo_indices(many, method, 2.0, torch.Generator().manual_seed(0))
    assert rows.equal(again)


def test_pf_ppo_without_any_weight():
    rows = pf_ppo_indices(torch.zeros(1000), "pow", 2.0, torch.Generator().manual_seed(0))
    assert len(rows.unique()) > 500
    with pytest.raises(ConfigError, match="reweight_method"):
        pf_ppo_indices(torch.zeros(3), "best")
