"""Validation metrics against a plain loop over the same subsets, and known answers."""

import itertools
import sys
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.validation_metrics import validation_metrics
from verl.trainer.ppo.metric_utils import process_validation_metrics


def reference(values, answers=None):
    """The metrics of one prompt, one sampled subset at a time."""
    n = len(values)
    metrics = {f"mean@{n}": np.mean(values)}
    if n == 1:
        return metrics
    metrics[f"std@{n}"] = np.std(values)
    k = 2
    sizes = []
    while k < n:
        sizes.append(k)
        k *= 2
    for k in [*sizes, n]:
        best, worst, majority = [], [], []
        generator = np.random.RandomState(42)
        for _ in range(1000):
            drawn = generator.choice(n, size=k, replace=True)
            best.append(max(values[i] for i in drawn))
            worst.append(min(values[i] for i in drawn))
            if answers is not None:
                votes = defaultdict(list)
                for i in drawn:
                    votes[answers[i]].append(values[i])
                majority.append(max(votes.values(), key=len)[0])
        for name, draws in (("best", best), ("worst", worst), ("maj", majority)):
            if draws:
                metrics[f"{name}@{k}/mean"], metrics[f"{name}@{k}/std"] = np.mean(draws), np.std(draws)
    return metrics


def shares(values, k):
    """The share of choices of k different samples that have a right one, choice by choice."""
    return np.mean([max(choice) for choice in itertools.combinations(values, k)])


def test_pass_at_k_is_the_share_of_choices_with_a_right_sample():
    samples = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    metrics = validation_metrics(["a"] * 8, [*"11112222"], {"acc": samples, "reward": [0.5] * 8})
    for k in (2, 4):
        expected = (shares(samples[:4], k) + shares(samples[4:], k)) / 2
        assert metrics[f"val-aux/a/acc/pass@{k}"] == pytest.approx(expected, abs=1e-12)
    assert metrics["val-aux/a/acc/pass@4"] == 1.0 > metrics["val-core/a/acc/best@4/mean"]
    assert not any("reward/pass" in name for name in metrics)


def test_a_prompt_counts_with_its_scored_samples():
    nan, plain = float("nan"), reference([0.0, 1.0, 0.0], ["x", "y", "x"])
    metrics = validation_metrics(
        ["d"] * 12, [*"aaaabbbbcccc"], {"reward": [1.0] * 4 + [0, nan, 1, 0] + [nan] * 4}, [*"xxxx", *"xzyx", *"xxxx"]
    )
    assert metrics["val-core/d/reward/mean@4"] == pytest.approx((1 + 1 / 3) / 2)
    assert metrics["val-aux/d/reward/pass@2"] == pytest.approx((1 + shares([0, 1, 0], 2)) / 2)
    assert metrics["val-aux/d/reward/pass@4"] == 1.0
    for name in ("best@2/mean", "worst@2/mean", "maj@2/mean"):
        assert metrics[f"val-aux/d/reward/{name}"] == pytest.approx((1 + plain[name]) / 2)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 8])
def test_equals_the_plain_loop(n):
    rng = np.random.default_rng(n)
    values = rng.random((3, n)).round(1)
    answers = rng.integers(0, 3, (3, n)).astype(str)
    metrics = validation_metrics(
        ["task"] * 3 * n,
        [f"u{i // n}" for i in range(3 * n)],
        {"reward": values.ravel().tolist()},
        list(answers.ravel()),
    )
    per_prompt = [reference(v, list(a)) for v, a in zip(values, answers)]
    expected = {name: np.mean([p[name] for p in per_prompt]) for name in per_prompt[0]}
    stripped = {name.split("/", 3)[3]: value for name, value in metrics.items()}
    assert stripped == pytest.approx(expected, abs=1e-12)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=4, max_size=4))
def test_laws(values):
    samples = values + [1.0 - v for v in values]
    named = validation_metrics(["s"] * 8, ["a"] * 4 + ["b"] * 4, {"acc": samples})
    metrics = {name.split("/", 3)[3]: value for name, value in named.items()}
    assert metrics["worst@4/mean"] <= metrics["worst@2/mean"] <= metrics["best@2/mean"] <= metrics["best@4/mean"]
    assert metrics["mean@4"] == pytest.approx(0.5)
    # prompts may come in any order, and mixed with each other
    mixed = [4, 0, 5, 1, 6, 2, 7, 3]
    assert validation_metrics(
        ["s"] * 8, ["ab"[i // 4] for i in mixed], {"acc": [samples[i] for i in mixed]}
    ) == pytest.approx(named)


def test_core_is_the_largest_n_of_acc_or_reward():
    sources = ["a"] * 8 + ["b"] * 2
    uids = ["1"] * 4 + ["2"] * 4 + ["3"] * 2
    nan = float("nan")
    values = {"reward": [1.0] * 10, "acc": [0.0, 1.0] * 4 + [nan, nan], "length": [3.0] * 10}
    metrics = validation_metrics(sources, uids, values, ["x"] * 10)
    core = sorted(name for name in metrics if name.startswith("val-core"))
    assert core == sorted(
        ["val-core/a/acc/" + m for m in ("mean@4", "best@4/mean", "best@4/std", "maj@4/mean", "maj@4/std")]
        + ["val-core/b/reward/" + m for m in ("mean@2", "best@2/mean", "best@2/std", "maj@2/mean", "maj@2/std")]
    )
    assert "val-aux/a/reward/mean@4" in metrics
    assert "val-aux/a/acc/best@2/mean" in metrics
    assert "val-aux/a/acc/worst@4/mean" in metrics
    assert not any("/b/acc" in name for name in metrics)
    assert metrics["val-core/a/acc/mean@4"] == 0.5


def test_a_part_is_over_the_samples_that_have_it():
    metrics = validation_metrics(
        ["a"] * 4, ["1", "1", "2", "2"], {"reward": [0.0, 0.0, 1.0, 1.0], "acc": [0.0, float("nan"), 1.0, 1.0]}
    )
    assert metrics["val-core/a/acc/mean@2"] == 0.5
    assert metrics["val-aux/a/reward/mean@2"] == 0.5


def test_majority_follows_the_votes():
    # two of three say "7", the right answer; the bootstrap of 3 finds it in 20 of 27 subsets (ties go to the first sampled)
    metrics = validation_metrics(["a"] * 3, ["1"] * 3, {"acc": [1.0, 1.0, 0.0]}, ["7", "7", "8"])
    assert metrics["val-core/a/acc/maj@3/mean"] == pytest.approx(20 / 27, abs=0.04)
    answers = ["7", None, None, None]  # only source a has answers
    metrics = validation_metrics(["a", "a", "b", "b"], ["1", "1", "2", "2"], {"acc": [1.0, 0.0, 1.0, 0.0]}, answers)
    assert [name for name in metrics if "maj" in name] == [f"val-core/a/acc/maj@2/{part}" for part in ("mean", "std")]


def test_one_prompt_of_two_sources_is_two_prompts():
    metrics = validation_metrics(["a", "b"], ["1", "1"], {"reward": [0.0, 1.0]})
    assert metrics == {"val-core/a/reward/mean@1": 0.0, "val-core/b/reward/mean@1": 1.0}


def test_door_returns_nested_names_and_skips_texts():
    infos = {"reward": [0.0, 1.0], "pred": ["x", "x"], "note": ["a", "b"]}
    metrics = process_validation_metrics(["s", "s"], ["1", "1"], infos)
    assert set(metrics["s"]) == {"reward"}
    assert metrics["s"]["reward"]["mean@2"] == 0.5
    assert "maj@2/mean" in metrics["s"]["reward"]


def test_a_prompt_costs_few_calls():
    """Of functions, counted, since a busy machine needs more time and makes no more calls."""
    num_prompts, n, calls = 1000, 16, []
    rng = np.random.default_rng(0)
    uids = [str(i // n) for i in range(num_prompts * n)]
    values = {"reward": rng.random(num_prompts * n).tolist()}
    sys.setprofile(lambda frame, event, argument: calls.append(event))
    try:
        validation_metrics(["a"] * len(uids), uids, values)
    finally:
        sys.setprofile(None)
    assert calls.count("call") + calls.count("c_call") < 100 * num_prompts  # 39 for each when written
