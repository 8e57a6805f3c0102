"""Keys that the tree has no more: those of older releases that cannot change a result here, and the names that other trainers
have for our keys.

Older keys with an equal in the tree are rows of aliases.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_MEMORY = "the reward model is cut by token count, without padding"
_PROFILER = "each step reports where its time went; no profiler is attached"
_FIXED = "it chose between implementations that are one here"


def _anything(value: Any) -> bool:
    return True


def _off(value: Any) -> bool:
    return not value


@dataclass(frozen=True)
class Gone:
    """`key` ending with a dot stands for everything below it."""

    key: str
    reason: str
    harmless: Callable[[Any], bool] = _anything  # values that change nothing; others are an unknown key


GONE: tuple[Gone, ...] = (
    Gone("reward_model.model.fsdp_config.", _MEMORY),
    Gone("reward_model.model.use_remove_padding", _MEMORY),
    Gone("reward_model.model.use_fused_kernels", _MEMORY),
    Gone("reward_model.micro_batch_size", _MEMORY),
    Gone("reward_model.micro_batch_size_per_gpu", _MEMORY),
    Gone("reward_model.use_dynamic_bsz", _MEMORY),
    Gone("reward_model.forward_max_token_len_per_gpu", _MEMORY),
    Gone("reward_model.ulysses_sequence_parallel_size", _MEMORY),
    Gone(
        "reward_model.model.input_tokenizer",
        "a reward model of other tokens reads the conversation in its own template",
    ),
    Gone("actor_rollout_ref.rollout.swap_space", "only vLLM reads it, under engine_kwargs.vllm"),
    Gone("actor_rollout_ref.rollout.micro_batch_size", "rollout is bounded by max_num_seqs and max_num_batched_tokens"),
    Gone("actor_rollout_ref.rollout.limit_images", "rows are text in this version"),
    Gone("actor_rollout_ref.rollout.use_fire_sampling", "it is off", _off),
    Gone("actor_rollout_ref.rollout.skip_rollout", "it is off", _off),
    Gone("actor_rollout_ref.rollout.chat_scheduler", "it is off", _off),
    Gone("actor_rollout_ref.rollout.engine_kwargs.swap_space", "only vLLM reads it, under engine_kwargs.vllm"),
    Gone("actor_rollout_ref.profiler.", _PROFILER),
    Gone("trainer.profile_steps", _PROFILER),
    Gone("trainer.controller_nsight_options.", _PROFILER),
    Gone("trainer.worker_nsight_options.", _PROFILER),
    Gone("trainer.npu_profile.", _PROFILER),
    Gone("trainer.use_legacy_worker_impl", _FIXED),
    Gone("trainer.remove_previous_ckpt_in_save", "it is off", _off),
)

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"

# what other trainers (TRL, OpenRLHF) and older releases call it -> what to set here
CALLED: dict[str, str] = {
    "learning_rate": f"{_ACTOR}.optim.lr",
    "actor_learning_rate": f"{_ACTOR}.optim.lr",
    "critic_learning_rate": "critic.optim.lr",
    "warmup_ratio": f"{_ACTOR}.optim.lr_warmup_steps_ratio",
    "max_grad_norm": f"{_ACTOR}.optim.clip_grad",
    "num_generations": f"{_ROLLOUT}.n",
    "n_samples_per_prompt": f"{_ROLLOUT}.n",
    f"{_ROLLOUT}.num_generations": f"{_ROLLOUT}.n",
    "temperature": f"{_ROLLOUT}.temperature",
    "max_prompt_length": "data.max_prompt_length",
    "prompt_max_len": "data.max_prompt_length",
    "max_completion_length": "data.max_response_length",
    "generate_max_len": "data.max_response_length",
    "beta": f"{_ACTOR}.use_kl_loss=True with {_ACTOR}.kl_loss_coef",
    "init_kl_coef": "algorithm.use_kl_in_reward=True with algorithm.kl_ctrl.kl_coef",
    "epsilon": f"{_ACTOR}.clip_ratio",
    "epsilon_high": f"{_ACTOR}.clip_ratio_high",
    "eps_clip": f"{_ACTOR}.clip_ratio",
    "loss_type": f"{_ACTOR}.loss_agg_mode and {_ACTOR}.policy_loss.loss_mode",
    "scale_rewards": "algorithm.norm_adv_by_std_in_grpo",
    "num_iterations": f"{_ACTOR}.ppo_epochs",
    "max_epochs": f"{_ACTOR}.ppo_epochs",
    "gradient_accumulation_steps": f"{_ACTOR}.ppo_mini_batch_size (prompts of one optimizer step; memory is "
    f"{_ACTOR}.ppo_max_token_len_per_gpu)",
    "per_device_train_batch_size": "data.train_batch_size (prompts of a step, over all devices)",
    "rollout_batch_size": "data.train_batch_size (prompts of a step, over all devices)",
    "micro_train_batch_size": f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    "num_train_epochs": "trainer.total_epochs",
    "num_episodes": "trainer.total_epochs",
    "max_steps": "trainer.total_training_steps",
    "save_steps": "trainer.save_freq",
    "eval_steps": "trainer.test_freq",
    "save_total_limit": "trainer.max_actor_ckpt_to_keep",
    "output_dir": "trainer.default_local_dir",
    "save_path": "trainer.default_local_dir",
    "report_to": "trainer.logger",
    "use_wandb": "trainer.logger=[console,wandb]",
    "run_name": "trainer.experiment_name",
    "model_name_or_path": "actor_rollout_ref.model.path",
    "pretrain": "actor_rollout_ref.model.path",
    "critic_pretrain": "critic.model.path",
    "reward_pretrain": "reward.reward_model.enable=True with reward.reward_model.model_path",
    "dataset_name": "data.train_files",
    "prompt_data": "data.train_files",
    "input_key": "data.prompt_key",
    "reward_funcs": "reward.custom_reward_function.path",
    "remote_rm_url": "reward.custom_reward_function.path",
    "advantage_estimator": "algorithm.adv_estimator",
    "algorithm.name": "algorithm.adv_estimator",
    "use_vllm": f"{_ROLLOUT}.name=vllm",
    "lora_r": "actor_rollout_ref.model.lora_rank",
    "zero_stage": f"{_ACTOR}.strategy=fsdp2",
    "seed": "data.seed",
    "trainer.seed": "data.seed",
    "trainer.remove_previous_ckpt_in_save": "trainer.max_actor_ckpt_to_keep=1",
    "algorithm.rollout_is_level": "algorithm.rollout_correction.rollout_is=token or =sequence",
    "algorithm.rollout_is_mode": "algorithm.rollout_correction.rollout_is (weights) or .rollout_rs (rejection)",
    "algorithm.rollout_is_veto_threshold": "algorithm.rollout_correction.rollout_rs",
}


def without_effect(key: str, value: Any) -> str | None:
    """Why the older key `key` with this value changes nothing; None when it is no such key."""
    for row in GONE:
        if (key.startswith(row.key) if row.key.endswith(".") else key == row.key) and row.harmless(value):
            return row.reason
    return None
