"""Properties of the results of a reward function: every later step can use a result, or it is the reason why not."""

import json
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.algorithms.batches import advantage_columns, map_columns
from tests.rewards import returns
from verl.algorithms.advantages import ADVANTAGES, compute_advantage
from verl.rewards.outcome import MAX_DEPTH, checked_outcome, outcome, within_size
from verl.rewards.sandbox.limits import Limits

LIMITS = Limits(max_parts=6, max_result_kb=2)

TEXTS = st.text(st.characters() | st.sampled_from("\x1b\n\r\0\ud800\udfff\u202e\u2028"), max_size=30)
NUMBERS = st.floats() | st.integers(-(10**400), 10**400) | st.booleans() | st.sampled_from([1e39, 3e38, 1e12, -1e12])
PLAIN = st.recursive(
    st.none() | NUMBERS | TEXTS,
    lambda below: st.lists(below, max_size=4) | st.dictionaries(TEXTS, below, max_size=4),
    max_leaves=12,
)
ODD = st.sampled_from(
    [b"1", object(), 1j, np.float32(0.5), np.array([1.0, np.nan]), np.arange(3), {1, 2}, (1, "x"), math]
)
VALUES = PLAIN | ODD | st.lists(ODD, max_size=2)
RESULTS = VALUES | st.builds(
    lambda score, parts: {"score": score, **parts},
    NUMBERS | ODD | TEXTS,
    st.dictionaries(TEXTS | st.integers() | st.none(), VALUES, max_size=8),
)


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


@given(RESULTS)
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
def test_a_result_can_be_used_or_has_a_reason(result):
    answer = within_size(outcome(result, LIMITS), LIMITS)
    if "error" in answer:
        assert returns.is_printable(answer["error"])
        assert 0 < len(answer["error"]) <= 1000
    else:
        returns.check(answer["score"], answer["parts"], LIMITS)
    assert checked_outcome(json.loads(json.dumps(answer)), LIMITS) == answer, "the run takes what its worker sends"


@given(PLAIN | st.dictionaries(st.sampled_from(["score", "parts", "error"]), PLAIN))
def test_whatever_a_worker_sends_is_an_outcome_or_refused(sent):
    answer = checked_outcome(sent, LIMITS)
    if answer is not None and "error" not in answer:
        returns.check(answer["score"], answer["parts"], Limits(max_parts=6))


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (1e39, "beyond reward.max_abs_score=1e+12 as 'score'"),
        ({"score": 1.0, "x": -3e38}, "as 'x', too large for the statistics"),
        ({"score": 1.0, "x": math.nan}, "returned nan as 'x', which is not a finite number"),
        ({"score": 1.0, **{str(i): i for i in range(7)}}, "with 7 parts; reward.max_parts=6 are allowed"),
        ({"score": 1.0, "x": "a" * 3000}, "more than reward.max_result_kb=2 allows"),
        ({"score": 1.0, "x": nested(MAX_DEPTH + 1)}, "more than 8 lists or dicts inside each other"),
        ({"score": 1.0, "x\x1b[2J": b"1"}, r"whose 'x\\x1b[2J' has a bytes"),
    ],
)
def test_a_refusal_names_limit_and_part(result, words):
    assert words in outcome(result, LIMITS)["error"]


def test_limits_hold_up_to_their_values():
    parts = {"a": 1e12, "b": -1e12, "c": "x" * 1900, "d": nested(MAX_DEPTH), "e": None, "\ud800": "\ud800"}
    answer = within_size(outcome({"score": 1e12, **parts}, LIMITS), LIMITS)
    assert answer["score"] == 1e12
    assert answer["parts"]["\\ud800"] == "\\ud800"
    assert outcome(True, LIMITS) == {"score": 1.0, "parts": {"acc": 1.0}}


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_the_largest_score_leaves_room_for_every_estimator(name):
    """One sample of the limit among ordinary ones: float32 statistics of its group and batch, and their squares, are finite."""
    single = map_columns(advantage_columns(0, singles=False), lambda _, x: x.float() if x.is_floating_point() else x)
    rewards = single["token_level_rewards"]
    last = int(single["response_mask"][0].nonzero()[-1])
    for score in (Limits().max_abs_score, -Limits().max_abs_score):
        rewards[0, last] = score
        single["reward_parts"]["x"][0] = score
        advantages, targets = compute_advantage(name, {**single, "token_level_rewards": rewards})
        assert torch.isfinite(advantages.square()).all()
        assert torch.isfinite(targets.square().sum()), "of a value loss over the batch"


def test_returns_of_every_kind_cost_their_own_sample(tmp_path):
    """A part of `python benchmarks/fuzz.py rewards`."""
    outcomes = list(returns.cases(random.Random(0), 120, tmp_path))
    assert {what for _, what in outcomes} == {"scored", "default score"}
    assert len({kind for kind, _ in outcomes}) == 14
