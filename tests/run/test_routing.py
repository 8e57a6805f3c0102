"""Runs with routing replay: R3 replays the experts of rollout, R2 the experts of the pass for old log-probs."""

import numpy as np
import pytest
import torch

from tests.models.test_routing import near_ties
from tests.run.conftest import broken_off
from tests.run.test_resume import weights
from tests.slow import slow
from verl.config import load_config
from verl.errors import ConfigError
from verl.models.load import load_causal_lm
from verl.models.tiny import make_tiny_model, make_tokenizer

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
R2, R3 = f"{ACTOR}.router_replay.mode=R2", f"{ROLLOUT}.enable_rollout_routing_replay=True"
SETTINGS = (f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.skip_zero_advantages=False")
DIFFERENCE = "training/rollout_probs_diff_max"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A model in float32 with routers that rounding decides."""
    path = tmp_path_factory.mktemp("mixture") / "model"
    folder = make_tiny_model(path, "qwen3_moe", num_experts=8, num_hidden_layers=3)
    near_ties(load_causal_lm(folder, dtype=torch.float32)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return f"actor_rollout_ref.model.path={folder}"


def test_sampler_and_trainer_agree_only_with_replay(tiny_run, mixture, batches):
    one_step = ("trainer.total_training_steps=1", f"{ACTOR}.ppo_mini_batch_size=4")
    without, replayed = (
        tiny_run(mixture, *SETTINGS, *one_step, *changes, folder=str(len(changes))).training_rows()[0]
        for changes in ((), (R3,))
    )
    assert without[DIFFERENCE] > 1e-3
    assert replayed[DIFFERENCE] < 1e-6
    records = batches[-1].non_tensor_batch["routed_experts"]
    assert {record.dtype for record in records} == {np.dtype(np.uint8)}


@pytest.mark.parametrize("mode", [slow(R2), R3])
def test_a_run_that_resumes_repeats_the_unbroken_run(tiny_run, mixture, mode):
    resumed, unbroken = broken_off(tiny_run, mixture, *SETTINGS, mode, "trainer.save_freq=1", stop=1)
    assert resumed.repeatable == unbroken.repeatable
    assert weights(resumed, 2) == weights(unbroken, 2)


def test_the_second_mini_batch_computes_with_recorded_experts(tiny_run, mixture, batches):
    tiny_run(mixture, *SETTINGS, R2, "trainer.total_training_steps=1")
    batch = batches[-1]
    lengths = batch.batch["attention_mask"].sum(dim=1).tolist()
    assert [len(record) for record in batch.non_tensor_batch["routed_experts"]] == [n - 1 for n in lengths]
    assert "old_log_probs" in batch.batch


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ((R3, R2), "enable_rollout_routing_replay=True records experts for .*mode=R3, and the mode is R2"),
        ((R3, f"{ROLLOUT}.name=hf"), "rollout.name=hf does not return them"),
        ((R3, f"{ROLLOUT}.multi_turn.enable=True"), "does not go with agents"),
        ((R2, "algorithm.rollout_correction.bypass_mode=True"), "bypass_mode=True leaves out"),
    ],
)
def test_keys_that_contradict_a_replay_are_refused(tiny_overrides, changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load_config([*tiny_overrides, *changes])


def test_each_key_asks_for_the_other(tiny_overrides):
    rollout_only = load_config([*tiny_overrides, R3])
    actor_only = load_config([*tiny_overrides, f"+{ACTOR}.megatron.router_replay.mode=R3"])
    for config in (rollout_only, actor_only):
        group = config.config.actor_rollout_ref
        assert group.actor.router_replay.mode == "R3"
        assert group.rollout.enable_rollout_routing_replay


def test_a_model_without_experts_is_refused(tiny_run):
    with pytest.raises(ConfigError, match="llama has none"):
        tiny_run(R3)
