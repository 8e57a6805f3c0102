"""Override lists of scripts that exist: the 60 most frequent keys at their frequent values run through main_ppo, with only
model, data, engine name and counts changed."""

import json
import os

import pytest

from tests.compat.script_lists import ACTOR, MODEL, REF, ROLLOUT, under
from tests.forked import run_forked
from tests.run.conftest import Run, merge

# the keys that a user changes to run here: model, data, engine name, counts
HERE = (
    "data.train_batch_size=8 data.max_prompt_length=64 data.max_response_length=8 trainer.n_gpus_per_node=1 trainer.nnodes=1 "
    f"{ROLLOUT}.name=native {ACTOR}.ppo_mini_batch_size=4 trainer.total_training_steps=2 trainer.save_freq=2"
)
NO_OFFLOAD = "model.fsdp_config.param_offload=False model.fsdp_config.optimizer_offload=False"
SHARED = (
    "data.filter_overlong_prompts=True data.truncation=error data.return_raw_chat=True algorithm.kl_ctrl.kl_coef=0.001 "
    f"{under(MODEL, 'use_remove_padding=True enable_gradient_checkpointing=True')} {ACTOR}.optim.lr=1e-6 "
    f"{under(ACTOR, 'fsdp_config.param_offload=False fsdp_config.optimizer_offload=False ppo_micro_batch_size_per_gpu=4')} "
    f"{under(ROLLOUT, 'log_prob_micro_batch_size_per_gpu=4 tensor_model_parallel_size=2 gpu_memory_utilization=0.6')} "
    f"{under(ROLLOUT, 'enforce_eager=False free_cache_engine=True enable_chunked_prefill=False')} "
    f'{ROLLOUT}.max_num_batched_tokens=1536 trainer.logger=["console","wandb"] '
    f"{under('trainer', 'critic_warmup=0 balance_batch=True val_before_train=False test_freq=5 total_epochs=15')}"
)
SIZES = "megatron.tensor_model_parallel_size=2 megatron.pipeline_model_parallel_size=2 megatron.param_offload=True"
GRPO = (
    "algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False "
    f"{under(ACTOR, 'use_kl_loss=True kl_loss_coef=0.001 kl_loss_type=low_var_kl entropy_coeff=0')} "
    f"{under(ACTOR, 'use_dynamic_bsz=True ppo_max_token_len_per_gpu=24000 use_torch_compile=False')} {ROLLOUT}.n=5 "
    f"{under(ROLLOUT, 'log_prob_use_dynamic_bsz=True log_prob_max_token_len_per_gpu=24000')} "
    f"{under(REF, 'log_prob_micro_batch_size_per_gpu=4 log_prob_use_dynamic_bsz=True')} "
    f"{under(REF, 'log_prob_max_token_len_per_gpu=8192 fsdp_config.param_offload=True')} {under(REF, SIZES)} "
    f"{under(ACTOR, SIZES)} ray_kwargs.ray_init.runtime_env.py_executable=null "
    f"{under(ACTOR, 'megatron.optimizer_offload=True megatron.grad_offload=True megatron.use_mbridge=True')}"
)
PPO = (
    "algorithm.adv_estimator=gae algorithm.use_kl_in_reward=False "
    f"{under(ACTOR, 'use_kl_loss=False kl_loss_coef=0.001 entropy_coeff=0.001')} "
    f"critic.optim.lr=1e-5 {under('critic.model', 'use_remove_padding=True enable_gradient_checkpointing=True')} "
    f"{under('critic', f'ppo_micro_batch_size_per_gpu=4 {NO_OFFLOAD}')} "
    f"{under(ROLLOUT, 'top_p=1.0 temperature=1.0')} trainer.resume_mode=auto"
)


def run_script(overrides, tiny_llama, tiny_task, folder) -> tuple[Run, str]:
    """As a shell script would: one process, `python -m verl.trainer.main_ppo key=value ...`."""
    here = (
        f"{HERE} data.train_files={tiny_task}/train.jsonl data.val_files={tiny_task}/val.jsonl {MODEL}.path={tiny_llama} "
        f"custom_reward_function.path={tiny_task}/reward.py trainer.default_local_dir={folder} "
        "trainer.project_name=verl_grpo_example_gsm8k trainer.experiment_name=qwen2_7b_function_rm"
    )
    command = ["verl.trainer.main_ppo", *merge(overrides.split(), here.split())]
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_DIR": str(folder)}
    code, said = run_forked(*command, env=environment, timeout_s=180)
    assert code == 0, said[-6000:]
    return Run(folder), said


@pytest.mark.slow
def test_frequent_grpo_script(tiny_llama, tiny_task, tmp_path):
    run, output = run_script(f"{SHARED} {GRPO}", tiny_llama, tiny_task, tmp_path / "run")
    rows = run.training_rows()
    assert [r["step"] for r in rows] == [1, 2]
    assert rows[1]["actor/kl_loss"] >= 0
    assert (run.folder / "global_step_2/actor/huggingface/config.json").exists()
    # keys that mean nothing here are named once, each by name
    assert "gpu_memory_utilization" in output
    assert "megatron" in output


def test_frequent_ppo_script(tiny_llama, tiny_task, tmp_path):
    run, _ = run_script(f"{SHARED} {PPO} critic.model.path={tiny_llama}", tiny_llama, tiny_task, tmp_path / "run")
    rows = run.training_rows()
    assert [r["step"] for r in rows] == [1, 2]
    assert all("critic/vf_loss" in r for r in rows)
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["steps"] == 2
