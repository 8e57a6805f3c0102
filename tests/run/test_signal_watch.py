"""A run that trains on nothing says so once, with the likeliest cause."""

import logging

import pytest

from verl.run.learning_signal import SignalWatch

SILENT = {"critic/advantages/max": 0.0, "critic/advantages/min": 0.0, "critic/score/mean": 0.0}
LEARNS = {**SILENT, "critic/advantages/max": 0.5}


def said(steps, samples_per_prompt=4):
    watch = SignalWatch(max_response_length=16, samples_per_prompt=samples_per_prompt)
    for step, metrics in enumerate(steps, 1):
        watch.note(step, metrics)


@pytest.mark.parametrize(
    ("metrics", "samples_per_prompt", "words"),
    [
        ({}, 4, "All samples of a prompt score the same"),
        ({}, 1, "set actor_rollout_ref.rollout.n to 4 or more"),
        ({"response_length/clip_ratio": 0.95}, 4, "95% of the responses are cut at data.max_response_length=16"),
        ({"reward/num_defaulted": 12}, 4, "The reward function has failed for 12 samples"),
    ],
)
def test_the_third_silent_step_warns(caplog, metrics, samples_per_prompt, words):
    with caplog.at_level(logging.WARNING, logger="verl"):
        said([{**SILENT, **metrics}] * 9, samples_per_prompt)
    assert [record.getMessage().count(words) for record in caplog.records] == [1]
    assert "Steps 1 to 3 learnt nothing" in caplog.text


def test_a_signal_in_between_begins_the_count_anew(caplog):
    with caplog.at_level(logging.WARNING, logger="verl"):
        said([SILENT, SILENT, LEARNS, SILENT, SILENT, {"critic/score/mean": 1.0}])
    assert not caplog.records


def test_updates_that_rounding_hides_are_told_once_for_each_role(caplog):
    hidden = {**LEARNS, "actor/visible_update_ratio": 0.1}
    with caplog.at_level(logging.WARNING, logger="verl"):
        said([{**LEARNS, "actor/visible_update_ratio": 0.9}, hidden, hidden, {"critic/visible_update_ratio": 0.4}])
    actor, critic = [record.getMessage() for record in caplog.records]
    assert "show 10% of what the actor has learned" in actor
    assert "Set actor_rollout_ref.actor.fsdp_config.master_rounding=dithered" in actor
    assert "critic.fsdp.dtype=float32" in critic
