"""Runs whose sampler computes in fewer bits: corrected, measured, guarded."""

import pytest

from tests.config.helpers import GRPO
from verl.config import load_config
from verl.errors import NumericsError
from verl.rollout.native.compiled.library import kernels

ROLLOUT, GUARD = "actor_rollout_ref.rollout", "trainer.guards.sampler_kl"
int8 = pytest.param("int8", marks=pytest.mark.skipif(kernels() is None, reason="no compiled decoder here"))


@pytest.mark.parametrize("quantization", [int8, "fp8"])
def test_the_gap_is_measured_weighed_and_repeats(tiny_run, quantization):
    runs = [tiny_run(f"{ROLLOUT}.quantization={quantization}", folder=name) for name in ("first", "second")]
    for row in runs[0].training_rows():
        assert 1e-6 < row["training/rollout_probs_diff_mean"] < 0.05
        assert 0 < row["rollout_corr/k3_kl"] < 0.1
        assert 0.5 < row["rollout_corr/rollout_is_mean"] < 2
        assert row["rollout_corr/rollout_rs_masked_fraction"] < 0.1
    assert runs[0].repeatable == runs[1].repeatable


def test_a_gap_beyond_its_limit_stops_the_run_which_can_be_resumed(tiny_run):
    settings = (f"{ROLLOUT}.quantization=fp8", "trainer.total_training_steps=2", "trainer.save_freq=1")
    tiny_run(*settings, "trainer.total_training_steps=1", folder="stopped")
    with pytest.raises(
        NumericsError, match=r"KL of the sampler .*Set .*quantization=null .*or raise .*run the same command"
    ):
        tiny_run(*settings, f"{GUARD}.limit=1e-9", f"{GUARD}.action=stop", folder="stopped")
    resumed = tiny_run(*settings, f"{GUARD}.limit=1", folder="stopped")
    assert [row["step"] for row in resumed.training_rows()] == [1, 2]


@pytest.mark.parametrize(("ahead", "limit"), [(0, 0.1), (1, None)])
def test_samples_made_ahead_have_no_limit_by_default_since_their_age_adds_to_the_gap(ahead, limit):
    settings = [f"{ROLLOUT}.quantization=fp8", f"{ROLLOUT}.prefetch_num={ahead}"]
    assert load_config([*GRPO, *settings]).config.trainer.guards.sampler_kl.limit == limit
