"""Override lists of scripts that exist: the 60 most frequent keys at their frequent values run through main_ppo, with only
model, data, engine name and counts changed."""

import json
import os

import pytest

from tests.forked import run_forked
from tests.run.conftest import Run

# the keys that a user changes to run here: model, data, engine name, counts
HERE = {
    "data.train_batch_size": 8,
    "data.max_prompt_length": 64,
    "data.max_response_length": 8,
    "actor_rollout_ref.rollout.name": "native",
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    "trainer.n_gpus_per_node": 1,
    "trainer.nnodes": 1,
    "trainer.total_training_steps": 2,
    "trainer.save_freq": 2,
}

SHARED = {
    "data.filter_overlong_prompts": True,
    "data.truncation": "error",
    "data.return_raw_chat": True,
    "actor_rollout_ref.actor.optim.lr": "1e-6",
    "actor_rollout_ref.model.use_remove_padding": True,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.actor.fsdp_config.param_offload": False,
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": False,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.6,
    "actor_rollout_ref.rollout.enforce_eager": False,
    "actor_rollout_ref.rollout.free_cache_engine": True,
    "actor_rollout_ref.rollout.enable_chunked_prefill": False,
    "actor_rollout_ref.rollout.max_num_batched_tokens": 1536,
    "trainer.critic_warmup": 0,
    "trainer.logger": '["console","wandb"]',
    "trainer.balance_batch": True,
    "trainer.val_before_train": False,
    "trainer.test_freq": 5,
    "trainer.total_epochs": 15,
    "algorithm.kl_ctrl.kl_coef": 0.001,
}

GRPO = {
    "algorithm.adv_estimator": "grpo",
    "algorithm.use_kl_in_reward": False,
    "actor_rollout_ref.actor.use_kl_loss": True,
    "actor_rollout_ref.actor.kl_loss_coef": 0.001,
    "actor_rollout_ref.actor.kl_loss_type": "low_var_kl",
    "actor_rollout_ref.actor.entropy_coeff": 0,
    "actor_rollout_ref.actor.use_dynamic_bsz": True,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 24000,
    "actor_rollout_ref.actor.use_torch_compile": False,
    "actor_rollout_ref.rollout.n": 5,
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": True,
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": 24000,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": True,
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": 8192,
    "actor_rollout_ref.ref.fsdp_config.param_offload": True,
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": 2,
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": 2,
    "actor_rollout_ref.actor.megatron.param_offload": True,
    "actor_rollout_ref.actor.megatron.optimizer_offload": True,
    "actor_rollout_ref.actor.megatron.grad_offload": True,
    "actor_rollout_ref.actor.megatron.use_mbridge": True,
    "actor_rollout_ref.ref.megatron.tensor_model_parallel_size": 2,
    "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size": 2,
    "actor_rollout_ref.ref.megatron.param_offload": True,
    "ray_kwargs.ray_init.runtime_env.py_executable": "null",
}

PPO = {
    "algorithm.adv_estimator": "gae",
    "algorithm.use_kl_in_reward": False,
    "actor_rollout_ref.actor.use_kl_loss": False,
    "actor_rollout_ref.actor.kl_loss_coef": 0.001,
    "actor_rollout_ref.actor.entropy_coeff": 0.001,
    "critic.optim.lr": "1e-5",
    "critic.model.use_remove_padding": True,
    "critic.model.enable_gradient_checkpointing": True,
    "critic.ppo_micro_batch_size_per_gpu": 4,
    "critic.model.fsdp_config.param_offload": False,
    "critic.model.fsdp_config.optimizer_offload": False,
    "actor_rollout_ref.rollout.top_p": 1.0,
    "actor_rollout_ref.rollout.temperature": 1.0,
    "trainer.resume_mode": "auto",
}


def run_script(overrides: dict, tiny_llama, tiny_task, folder) -> tuple[Run, str]:
    """As a shell script would: one process, `python -m verl.trainer.main_ppo key=value ...`."""
    overrides = {
        **overrides,
        **HERE,
        "data.train_files": f"{tiny_task}/train.jsonl",
        "data.val_files": f"{tiny_task}/val.jsonl",
        "actor_rollout_ref.model.path": tiny_llama,
        "custom_reward_function.path": f"{tiny_task}/reward.py",
        "trainer.project_name": "verl_grpo_example_gsm8k",
        "trainer.experiment_name": "qwen2_7b_function_rm",
        "trainer.default_local_dir": folder,
    }
    command = ["verl.trainer.main_ppo", *(f"{k}={v}" for k, v in overrides.items())]
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_DIR": str(folder)}
    code, said = run_forked(*command, env=environment, timeout_s=180)
    assert code == 0, said[-6000:]
    return Run(folder), said


@pytest.mark.slow
def test_frequent_grpo_script(tiny_llama, tiny_task, tmp_path):
    run, output = run_script({**SHARED, **GRPO}, tiny_llama, tiny_task, tmp_path / "run")
    rows = run.training_rows()
    assert [r["step"] for r in rows] == [1, 2]
    assert rows[1]["actor/kl_loss"] >= 0
    assert (run.folder / "global_step_2/actor/huggingface/config.json").exists()
    # keys that mean nothing here are named once, each by name
    assert "gpu_memory_utilization" in output
    assert "megatron" in output


def test_frequent_ppo_script(tiny_llama, tiny_task, tmp_path):
    overrides = {**SHARED, **PPO, "critic.model.path": tiny_llama}
    run, _ = run_script(overrides, tiny_llama, tiny_task, tmp_path / "run")
    rows = run.training_rows()
    assert [r["step"] for r in rows] == [1, 2]
    assert all("critic/vf_loss" in r for r in rows)
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["steps"] == 2
