"""Snippets of seed document 003 (placement on GPUs in three steps), as written but for model, data, devices and counts."""

import logging

import pytest

from tests.letters_task import overrides, write_task


@pytest.mark.seed("E3")
def test_3_3_devices_of_roles(capsys):
    from verl import DataParallelConfig
    from verl.config import load_config
    from verl.programs.specs import placement_of
    from verl.utils import set_device_map

    dp_config = DataParallelConfig(actor_devices=[0, 1], critic_devices=[2], reward_model_devices=[3])
    set_device_map(dp_config)
    try:
        keys = ["algorithm.adv_estimator=gae", "trainer.n_gpus_per_node=4"]
        devices = placement_of(load_config(keys, check=False).config).devices
        assert (devices["actor"], devices["critic"], devices["reward"]) == ((0, 1), (2,), (3,))
    finally:
        set_device_map(None)


@pytest.mark.seed("E4", "G9")
def test_4_logs_and_trackers(tiny_llama, tmp_path, caplog):
    """4.2: one sample at a time, ZeRO's second stage, an emptied cache; 4.3: standard logging, and a tracker by its name."""
    import torch

    from verl.trainer import PPOTrainer

    logging.basicConfig(level=logging.INFO)
    task = write_task(tmp_path)
    torch.cuda.empty_cache()
    trainer = PPOTrainer(
        overrides(
            tiny_llama, task, "data.train_batch_size=2", "data.max_response_length=4", "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2", "batch_size_per_gpu=1",
            "actor_rollout_ref.actor.fsdp_config.param_offload=True",
            "actor_rollout_ref.actor.fsdp_config.reshard_after_forward=False", "trainer.total_training_steps=1",
            "model.enable_gradient_checkpointing=True", f"trainer.default_local_dir={tmp_path}/run",
        ),
        log_with="tensorboard",  # or "wandb"
    )  # fmt: skip
    pytest.importorskip("tensorboard")
    trainer.train()
    assert list((tmp_path / "run").rglob("events.out.tfevents*"))
