"""docs/metrics.md has every metric of a run."""

import fnmatch
import re

import pytest

from tests.house.source import ROOT


def rows_of_the_page():
    """Names and patterns of the first column of the tables."""
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`[^|]+) \|", page, re.M)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


KL_IN_LOSS = ("actor_rollout_ref.actor.use_kl_loss=True",)
CRITIC = ("algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=True", "critic.enable=null")
AHEAD = ("actor_rollout_ref.rollout.prefetch_num=1", "algorithm.rollout_correction.rollout_is=token")


@pytest.mark.parametrize("keys", [KL_IN_LOSS, CRITIC, AHEAD], ids=["grpo", "ppo", "ahead"])
def test_metrics_of_a_run_are_on_the_page(tiny_run, keys):
    names = {
        name for row in tiny_run(*keys, "trainer.test_freq=1", "trainer.total_training_steps=1").rows for name in row
    }
    assert len(names) > 60
    assert "rollout/last_group/prompt" in names
    patterns = rows_of_the_page()
    assert sorted(name for name in names if not any(fnmatch.fnmatchcase(name, p) for p in patterns)) == []
