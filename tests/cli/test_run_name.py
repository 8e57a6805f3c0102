"""The run folder of a command that names none."""

import pytest

from verl.cli.arguments import with_run_folder
from verl.config import PPO, PREFERENCE, SFT, load_config

KEYS = ["algorithm.adv_estimator=grpo", "data.train_files=x.jsonl"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)


def folder_of(*keys, schema=PPO):
    trainer = with_run_folder(load_config([*KEYS[1:], *keys], schema=schema, check=False)).config.trainer
    assert trainer.experiment_name in trainer.default_local_dir
    return trainer.default_local_dir


def test_it_carries_task_and_time():
    task, day, seconds, digest = folder_of(*KEYS[:1]).removeprefix("checkpoints/").split("-")
    assert (task, len(day), len(seconds), len(digest)) == ("grpo", 8, 6, 6)
    assert folder_of("preference.loss=orpo", schema=PREFERENCE).startswith("checkpoints/orpo-")
    assert folder_of(schema=SFT).startswith("checkpoints/sft-")
    assert folder_of("algorithm.program=rejection_sampling").startswith("checkpoints/rejection_sampling-")
    assert folder_of("algorithm.program=a/b.py:C").startswith("checkpoints/ppo-")


def test_the_same_command_finds_its_newest_folder_again(tmp_path):
    digest = folder_of(*KEYS[:1])[-6:]
    for time in ("20260102-000000", "20260301-000000"):
        (tmp_path / "checkpoints" / f"grpo-{time}-{digest}").mkdir(parents=True)
    newest = f"checkpoints/grpo-20260301-000000-{digest}"
    assert folder_of(*KEYS[:1]) == newest
    assert folder_of(*KEYS[:1], "trainer.total_training_steps=9", "trainer.n_gpus_per_node=2") == newest
    assert folder_of(*KEYS[:1], "trainer.resume_mode=disable") != newest
    assert folder_of(*KEYS[:1], "actor_rollout_ref.rollout.n=3")[-6:] != digest
    assert folder_of(*KEYS[:1], "actor_rollout_ref.model.path=other")[-6:] != digest


@pytest.mark.parametrize(
    ("key", "folder"),
    [
        ("trainer.default_local_dir=mine", "mine"),
        ("trainer.experiment_name=night", "checkpoints/verl_examples/night"),
        ("trainer.project_name=p", "checkpoints/p/gsm8k"),
    ],
)
def test_names_of_the_user_stay(key, folder):
    assert with_run_folder(load_config([*KEYS, key], check=False)).config.trainer.default_local_dir == folder


def test_ranks_of_a_launcher_share_a_folder(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert (
        with_run_folder(load_config(KEYS, check=False)).config.trainer.default_local_dir
        == "checkpoints/verl_examples/gsm8k"
    )


def test_a_run_resumes_in_it(verl, overrides, tmp_path):
    keys = [key for key in overrides({"trainer.save_freq": 1}) if "default_local_dir" not in key]
    for steps in (1, 2):
        verl.ends(0, "train", *keys, f"trainer.total_training_steps={steps}")
    (folder,) = (tmp_path / "checkpoints").iterdir()
    assert (folder / "global_step_2").is_dir()
    assert f"checkpoints/{folder.name}; resumes from step 2" in verl("check", *keys)[1]
