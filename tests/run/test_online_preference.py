"""Online preference optimization from end to end on a tiny model: pairs, loss, a moving reference, resuming."""

import math

import pytest

from tests.run.conftest import broken_off
from verl.algorithms.filters import best_and_worst

SETTINGS = (
    "algorithm.program=online_dpo",
    "actor_rollout_ref.actor.optim.lr=0.01",
    "preference.beta=0.1",
    "trainer.save_freq=1",
)


def test_pairs_are_the_best_and_the_worst_of_each_prompt():
    assert best_and_worst([1, 3, 2, 5, 5, 0, 0, 4], list("aaabbccd")) == [(1, 0)]
    assert best_and_worst([1, 3, 3, 0], list("abba")) == [(0, 3)]
    assert best_and_worst([], []) == []


def test_a_step_is_dpo_on_pairs(tiny_run):
    run = tiny_run(*SETTINGS, "trainer.total_training_steps=6")
    first, last = run.training_rows()[0], run.training_rows()[-1]
    assert first["actor/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert 0 < first["online/pair_ratio"] <= 1
    assert first["objective/scores_margin"] > 0
    assert last["objective/scores"] > first["objective/scores"]
    assert last["actor/rewards/margins"] != 0


def test_the_likelihood_of_chosen_samples_does_not_depend_on_the_mini_batches(tiny_run):
    """Mini-batches of one pair have the mean over their own tokens. The weights hardly move between them."""
    settings = (
        *SETTINGS,
        "preference.loss=cpo",
        "actor_rollout_ref.actor.optim.lr=1e-9",
        "trainer.total_training_steps=1",
    )
    undivided = tiny_run(*settings, folder="whole").training_rows()[0]
    parts = tiny_run(*settings, "actor_rollout_ref.actor.ppo_mini_batch_size=1", folder="parts").training_rows()[0]
    assert parts["actor/nll_loss"] == pytest.approx(undivided["actor/nll_loss"], rel=0.05)


def test_a_resumed_run_equals_the_unbroken_one(tiny_run):
    settings = (*SETTINGS, "online.sync_steps=2", "online.mixup_alpha=1.0", "trainer.total_training_steps=4")
    resumed, unbroken = broken_off(tiny_run, *settings, stop=3)
    assert [row for row in resumed.repeatable if row["step"] > 3] == [r for r in unbroken.repeatable if r["step"] > 3]
    # the opponent of the third step is the policy after the second
    assert unbroken.training_rows()[2]["actor/loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert unbroken.training_rows()[1]["actor/loss"] != pytest.approx(math.log(2), abs=1e-4)
