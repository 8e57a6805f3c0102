"""Snippets of seed document 000 (3D resharding in practice), as written but for model, data, devices and counts.

Its YAML (3.2, 3.3, 4.2) is in test_yaml.py.
"""

import os
import sys

import pytest
import torch

from tests.commands import ran
from tests.letters_task import overrides, write_task
from verl.cli.main import main
from verl.config import load_config
from verl.rollout.native.compiled.library import kernels
from verl.run.host import train
from verl.tracking.files import read_metrics
from verl.trainer.logger import RLLogger
from verl.trainer.rl_trainer import RLTrainer


def shell(script, folder, **environment):
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    return ran("sh", "-ec", script, cwd=folder, timeout=150, env={**os.environ, "PATH": path, **environment}).stdout


@pytest.fixture(scope="module")
def settings(tiny_llama, tmp_path_factory):
    task = write_task(tmp_path_factory.mktemp("task"))
    return overrides(
        tiny_llama, task, "data.train_batch_size=2", "data.max_response_length=4", "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.total_training_steps=1", "trainer.resume_mode=disable",
    )  # fmt: skip


@pytest.mark.seed("E1")
def test_2_the_installation(tmp_path):
    said = shell("python <<'END'\nimport verl\nprint(verl.__version__)\nEND", tmp_path, PYTHONPATH=_root())
    assert said.strip().count(".") >= 2


@pytest.mark.seed("G3", "D2")
def test_3_2_a_step_and_its_queue(settings, tmp_path):
    ahead = ["rollout_config.prefetch_num=2", "trainer.total_training_steps=3"]
    with RLTrainer([*settings, *ahead, f"trainer.default_local_dir={tmp_path}"]) as trainer:
        rollout_queue = trainer.rollout_queue
        metrics = trainer.step()
        assert rollout_queue.qsize() == 2
        assert 0 < metrics["share/rollout_step"] <= 1
        trainer.step()
        trainer.step()
        assert rollout_queue.qsize() == 0  # nothing is generated beyond the last step


@pytest.mark.seed("C9")
def test_3_3_fragments(settings, tmp_path):
    statistics = torch.cuda.memory_stats() if torch.cuda.is_available() else {}
    assert statistics.get("allocated_bytes.all.current", 0) <= statistics.get("reserved_bytes.all.current", 0)
    if kernels() is None:
        pytest.skip("the decoding kernels are not compiled for this processor")
    keys = ["kv_cache_config.enable_paged_attention=True", "max_prompt_length=64"]
    assert train(load_config([*settings, *keys, f"trainer.default_local_dir={tmp_path}"])) == 0
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert 0 < row["rollout/kv_fragmentation"] < 1
    assert row["rollout/num_preempted"] == 0


@pytest.mark.seed("F2")
def test_5_2_logs_of_ranks(settings, tmp_path):
    assert main(["train", "--log-dir", f"{tmp_path}/logs", *settings, f"trainer.default_local_dir={tmp_path}/run"]) == 0
    for folder in ("logs", "run/logs"):
        assert "Loaded" in (tmp_path / folder / "rank_0.log").read_text()
    log = RLLogger(log_dir=str(tmp_path / "own"), rank=3)
    log.warning("a line")
    log.close()
    assert "a line" in (tmp_path / "own" / "rank_3.log").read_text()


def _root():
    from pathlib import Path

    import verl

    return str(Path(verl.__file__).parents[1])
