"""docs/metrics.md has every metric of a run."""

import fnmatch
import json
import re

import pytest

from tests.house.source import ROOT
from tests.run.conftest import merge
from verl.config import load_config
from verl.run.host import train


def rows_of_the_page():
    """Names and patterns of the first column of the tables."""
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`[^|]+) \|", page, re.M)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


KL_IN_LOSS = (
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.rollout.n=4",
)
CRITIC = ("algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=True", "critic.enable=null")
AHEAD = (
    "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.prefetch_num=1",
    "algorithm.rollout_correction.rollout_is=token",
)  # fmt: skip


@pytest.mark.parametrize("keys", [KL_IN_LOSS, CRITIC, AHEAD], ids=["grpo", "ppo", "ahead"])
def test_metrics_of_a_run_are_on_the_page(tiny_overrides, tmp_path, keys):
    own = (
        *keys,
        "trainer.test_freq=1",
        "trainer.total_training_steps=1",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    )
    train(load_config(merge(tiny_overrides, own)))
    names = {
        name for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines() for name in json.loads(line)
    }
    assert len(names) > 60
    assert "rollout/last_group/prompt" in names
    patterns = rows_of_the_page()
    assert sorted(name for name in names if not any(fnmatch.fnmatchcase(name, p) for p in patterns)) == []
