"""Runs in float16: samples, a loss scale that survives a resume, and keys that ask for float16 in vain."""

import pytest

from tests.run.conftest import broken_off
from tests.run.test_resume import weights
from verl.config import load_config
from verl.errors import ConfigError
from verl.models import loss_scale

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
FLOAT16 = (f"{ACTOR}.fsdp_config.dtype=float16", f"{ROLLOUT}.dtype=float16")
SETTINGS = (*FLOAT16, f"{ACTOR}.ppo_mini_batch_size=2", "trainer.total_training_steps=3", "trainer.save_freq=1")
SCALE, SKIPPED = "actor/loss_scale", "actor/overflow_ratio"


def test_a_run_in_float16_skips_what_overflows_and_resumes_bit_for_bit(tiny_run, monkeypatch, capsys):
    """The scale begins so high that gradients overflow, and is halved until a step is taken."""
    monkeypatch.setattr(loss_scale.LossScale, "__init__", begin_high)
    resumed, unbroken = broken_off(tiny_run, *SETTINGS, stop=2)
    assert resumed.repeatable == unbroken.repeatable
    assert weights(resumed, 3) == weights(unbroken, 3)
    rows = unbroken.training_rows()
    assert [row[SKIPPED] for row in rows] == [1, 1, 1]
    assert [row[SCALE] for row in rows] == [1.5 * 2.0**38, 1.5 * 2.0**36, 1.5 * 2.0**34]  # of two mini-batches
    assert all("actor/grad_norm" not in row for row in rows)
    assert "float16" in capsys.readouterr().out


def begin_high(self, value=2.0**40, num_steps=0):
    self.value, self.num_steps = value, num_steps


def test_sampler_and_trainer_agree_in_float16(tiny_run):
    rows = tiny_run(*SETTINGS, f"{ACTOR}.skip_zero_advantages=False").training_rows()
    assert max(row["training/rollout_probs_diff_max"] for row in rows) < 2e-3
    assert all(row[SKIPPED] == 0 and row[SCALE] == 2.0**16 for row in rows)
    assert all(0 < row["actor/grad_norm"] < float("inf") for row in rows)


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        (f"{ROLLOUT}.dtype=float16", r"rollout\.dtype=float16 differs from .*fsdp_config\.dtype=float32"),
        (f"{ACTOR}.fsdp_config.model_dtype=fp16", "master weights in float16; they are always float32"),
    ],
)
def test_a_key_that_asks_for_float_16_in_vain_is_refused(tiny_overrides, key, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load_config([*tiny_overrides, key])
