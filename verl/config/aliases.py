"""Older and newer spellings of the same key. Each row: spelling in scripts -> path in the tree.

A row that ends with a dot renames everything below it. The most specific row wins.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"


@dataclass(frozen=True)
class Alias:
    old: str
    new: str
    ignore: tuple[Any, ...] = (None,)  # values with which the old spelling asks for nothing
    implies: dict[str, Any] = field(default_factory=dict)  # what the old spelling says besides; given keys stay


def _optim(prefix: str) -> tuple[Alias, ...]:
    return (
        Alias(f"{prefix}.optim.warmup_style", f"{prefix}.optim.lr_scheduler_type"),
        Alias(f"{prefix}.grad_clip", f"{prefix}.optim.clip_grad", ignore=(None, 1.0)),
    )


def _fsdp(prefix: str) -> tuple[Alias, ...]:
    return (
        Alias(f"{prefix}.mixed_precision.param_dtype", f"{prefix}.dtype"),
        Alias(f"{prefix}.cpu_offload", f"{prefix}.param_offload"),
    )


def _lora(prefix: str) -> tuple[Alias, ...]:
    return (
        Alias(f"{prefix}.lora.rank", f"{prefix}.lora_rank", ignore=(None, 0)),
        Alias(f"{prefix}.lora.alpha", f"{prefix}.lora_alpha", ignore=(None, 32)),
        Alias(f"{prefix}.lora.adapter_path", f"{prefix}.lora_adapter_path"),
    )


ALIASES: tuple[Alias, ...] = (
    *(Alias(f"{_ACTOR}.policy_loss.{name}", f"{_ACTOR}.{name}") for name in ("tau_pos", "tau_neg")),
    *_optim(_ACTOR),
    *_optim("critic"),
    *_fsdp(f"{_ACTOR}.fsdp_config"),
    *_fsdp("actor_rollout_ref.ref.fsdp_config"),
    *_fsdp("critic.fsdp"),
    *_lora(_MODEL),
    *_lora("critic.model"),
    Alias(
        f"{_ACTOR}.ulysses_sequence_parallel_size", f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size", ignore=(1,)
    ),
    Alias(
        "actor_rollout_ref.ref.ulysses_sequence_parallel_size",
        "actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size",
        ignore=(1,),
    ),
    Alias("critic.ulysses_sequence_parallel_size", "critic.fsdp.ulysses_sequence_parallel_size", ignore=(1,)),
    Alias("critic.model.fsdp_config.", "critic.fsdp."),
    Alias("critic.fsdp_config.", "critic.fsdp."),
    Alias("custom_reward_function.", "reward.custom_reward_function."),
    Alias("sandbox_fusion.", "reward.sandbox_fusion."),
    Alias("reward_model.sandbox_fusion.", "reward.sandbox_fusion."),
    Alias("reward_model.", "reward.reward_model."),
    Alias("reward_model.num_workers", "reward.num_workers"),
    Alias("reward_model.reward_manager", "reward.reward_manager.name"),
    Alias("reward_model.reward_kwargs.", "reward.reward_kwargs."),
    Alias("reward_model.overlong_buffer.", "reward.reward_kwargs.overlong_buffer_cfg."),
    Alias("reward_model.use_reward_loop", "reward.use_reward_loop"),
    Alias("reward_model.launch_reward_fn_async", "reward.launch_reward_fn_async"),
    Alias("reward_model.reward_loop_source", "reward.reward_manager.source"),
    Alias("reward_model.reward_loop_module_path", "reward.reward_manager.module.path"),
    Alias("reward_model.reward_loop_class_name", "reward.reward_manager.name"),
    Alias("reward_model.model.path", "reward.reward_model.model_path"),
    Alias("reward_model.model.external_lib", "reward.reward_model.external_lib"),
    Alias("reward_model.model.trust_remote_code", "reward.reward_model.trust_remote_code"),
    Alias("reward_batch_size", "reward.reward_model.reward_batch_size"),
    Alias("reward.reward_batch_size", "reward.reward_model.reward_batch_size"),
    *(Alias(f"{role}.checkpoint.contents", f"{role}.checkpoint.save_contents") for role in (_ACTOR, "critic")),
    Alias(
        f"{_ACTOR}.tis_imp_ratio_cap",
        "algorithm.rollout_correction.rollout_is_threshold",
        ignore=(None, -1),
        implies={"algorithm.rollout_correction.rollout_is": "token"},
    ),
    Alias(
        "actor_rollout_ref.rollout.update_weights_bucket_megabytes",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes",
    ),
    Alias("trainer.val_generations_to_log_to_wandb", "trainer.log_val_generations"),
    Alias("ray_init.", "ray_kwargs.ray_init."),
    Alias("data.tokenizer", f"{_MODEL}.tokenizer_path"),
    Alias("rollout_config.prefetch_num", "actor_rollout_ref.rollout.prefetch_num"),
    Alias("trainer.log_with", "trainer.logger"),
    Alias("algorithm.rollout_is", "algorithm.rollout_correction.rollout_is"),
    Alias("algorithm.rollout_is_threshold", "algorithm.rollout_correction.rollout_is_threshold"),
    # a script that gives this one number means KL-regularised PPO and has no other switch for it
    Alias("algorithm.kl_coef", "algorithm.kl_ctrl.kl_coef", implies={"algorithm.use_kl_in_reward": True}),
    Alias("algorithm.cliprange", f"{_ACTOR}.clip_ratio"),
    Alias("actor_model.", f"{_ACTOR}."),
    Alias("fsdp_config.", f"{_ACTOR}.fsdp_config."),
    Alias("model.", f"{_MODEL}."),
    Alias("mixed_precision.", f"{_ACTOR}.fsdp_config.mixed_precision."),
    Alias("ulysses_sequence_parallel_size", f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size"),
)

_EXACT = {a.old: a for a in ALIASES if not a.old.endswith(".")}
_PREFIX = sorted((a for a in ALIASES if a.old.endswith(".")), key=lambda a: -len(a.old))


def resolve(path: str) -> tuple[str, Alias | None]:
    """(path in the tree, the last row used or None). Renames until no row applies any more."""
    used: Alias | None = None
    for _ in range(4):  # a prefix row may lead to an exact one; no chain is longer
        row = _EXACT.get(path)
        if row is not None:
            path, used = row.new, row
            continue
        row = next((a for a in _PREFIX if path.startswith(a.old)), None)
        if row is None:
            break
        path, used = row.new + path[len(row.old) :], row
    return path, used


def other_spellings() -> list[str]:
    """Old exact spellings, for suggestions."""
    return list(_EXACT)
