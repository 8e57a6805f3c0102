"""A run that trains on nothing says so once, with the likeliest cause."""

import logging

import pytest

from verl.programs.ppo_program import SignalWatch
from verl.run.loop import Loop

SILENT = {"critic/advantages/max": 0.0, "critic/advantages/min": 0.0, "critic/score/mean": 0.0}
LEARNS = {**SILENT, "critic/advantages/max": 0.5}


def said(steps, samples_per_prompt=4):
    watch = SignalWatch(max_response_length=16, samples_per_prompt=samples_per_prompt)
    for step, metrics in enumerate(steps, 1):
        watch.record(step, metrics)


@pytest.mark.parametrize(
    ("metrics", "samples_per_prompt", "words"),
    [
        ({}, 4, "All samples of a prompt score the same"),
        ({}, 1, "set actor_rollout_ref.rollout.n to 4 or more"),
        ({"response_length/clip_ratio": 0.95}, 4, "95% of the responses are cut at data.max_response_length=16"),
        ({"rollout/num_failed_episodes": 7}, 4, "7 episodes of the last step have failed"),
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


def test_updates_that_rounding_hides_are_warned_of_once_for_each_role(tiny_run, monkeypatch, caplog):
    """Not those of weight decay in a step without a gradient."""
    shown = iter([(0.1, 0.0), (0.1, 1.0), (0.1, 1.0)])
    metrics = Loop._metrics

    def hidden(self, result, seconds):
        named = zip(("actor/visible_update_ratio", "actor/grad_norm"), next(shown), strict=True)
        return {**metrics(self, result, seconds), **dict(named)}

    monkeypatch.setattr(Loop, "_metrics", hidden)
    tiny_run("trainer.total_training_steps=3")
    (said,) = [r.getMessage() for r in caplog.records if r.name == "verl.run.loop"]
    assert "Only 10% of the weight updates of the actor survive rounding" in said
    assert "Set actor_rollout_ref.actor.fsdp_config.master_rounding=dithered" in said
