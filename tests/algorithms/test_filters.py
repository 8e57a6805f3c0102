"""Group filter, PF-PPO and the best samples of a group."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.algorithms.filters import best_and_worst, best_of_groups, filter_groups, pf_ppo_indices
from verl.data_proto.proto import DataProto
from verl.errors import ConfigError
from verl.programs.collect import Collector


def test_rows_without_a_score_are_neither_compared_nor_chosen():
    uids, scores = list("aaabbbcc"), [1.0, 1.0, 0.0, 0.0, 1.0, 5.0, 0.0, 1.0]
    scored = [True, True, False, True, True, False, False, False]
    assert filter_groups(scores, uids, scored).tolist() == [False] * 3 + [True] * 3 + [False] * 2
    assert best_and_worst(scores, uids, scored) == [(4, 3)]
    for method in ("pow", "max_min", "max_random"):
        rows = pf_ppo_indices(torch.tensor(scores), method, is_scored=torch.tensor(scored))
        assert len(rows) == len(scores)
        assert all(scored[row] for row in rows.tolist())
    zeros = pf_ppo_indices(torch.zeros(8), "pow", is_scored=torch.tensor(scored))
    assert all(scored[row] for row in zeros.tolist())


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
    frequencies = torch.bincount(rows % 4, minlength=4) / len(rows)
    expected = torch.tensor(weights) / sum(weights)
    assert float((frequencies - expected).abs().max()) < 0.02
    again = pf_ppo_indices(many, method, 2.0, torch.Generator().manual_seed(0))
    assert rows.equal(again)


def test_pf_ppo_without_any_weight():
    rows = pf_ppo_indices(torch.zeros(1000), "pow", 2.0, torch.Generator().manual_seed(0))
    assert len(rows.unique()) > 500
    with pytest.raises(ConfigError, match="reweight_method"):
        pf_ppo_indices(torch.zeros(3), "best")


def test_best_of_groups_by_hand():
    scores, uids = [0.1, 0.9, 0.9, 0.5, 0.2, 0.2], list("aaabbb")
    assert best_of_groups(scores, uids) == [1, 3]  # of equal scores the earlier row
    assert best_of_groups(scores, uids, keep=2) == [1, 2, 3, 4]
    assert best_of_groups(scores, uids, keep=2, contents=list("xyypqq")) == [0, 1, 3, 4]
    assert best_of_groups(scores, uids, keep=3, min_score=0.5) == [1, 2, 3]
    assert best_of_groups(scores, uids, min_score=1.0) == []
    assert best_of_groups(scores, uids, allowed=[True, False, False, False, True, True]) == [0, 4]


ROWS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(0, 3), st.booleans()), min_size=1, max_size=10
)


@given(ROWS, st.integers(1, 4), st.integers(0, 4))
def test_best_of_groups_leaves_out_nothing_better(rows, keep, min_score):
    uids, scores, contents, allowed = map(list, zip(*rows, strict=True))
    selected = best_of_groups(scores, uids, keep=keep, min_score=min_score, contents=contents, allowed=allowed)
    assert selected == sorted(set(selected))
    for uid in set(uids):
        chosen = [row for row in selected if uids[row] == uid]
        usable = [r for r, u in enumerate(uids) if u == uid and allowed[r] and scores[r] >= min_score]
        assert len(chosen) == min(keep, len({contents[row] for row in usable}))
        assert set(chosen) <= set(usable)
        assert len({contents[row] for row in chosen}) == len(chosen)
        unchosen = {contents[row] for row in usable} - {contents[row] for row in chosen}
        best_left = max((scores[row] for row in usable if contents[row] in unchosen), default=-2.0)
        assert all(scores[row] >= best_left for row in chosen)


def test_the_metric_score_is_the_number_of_the_reward_function_and_the_others_are_shaped():
    parts = np.array([{"unshaped_score": -1.0}, {"unshaped_score": -1.0}, {}], object)
    batch = DataProto.from_dict(
        {"token_level_scores": torch.tensor([[0.0, -2.0], [0.0, -1.5], [1.0, 2.0]]), "is_scored": torch.ones(3).bool()},
        {"reward_parts": parts},
    )
    for metric, expected in (("score", [-1, -1, 3]), (None, [-1, -1, 3]), ("seq_reward", [-2, -1.5, 3])):
        rule = SimpleNamespace(algorithm=SimpleNamespace(filter_groups=SimpleNamespace(metric=metric)))
        assert Collector._filter_metric(SimpleNamespace(config=rule), batch) == expected
