"""Validation, rewards and resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl.config.active_keys import uses_critic
from verl.config.rules.api import Rule
from verl.config.unavailable import value_in

_ROLLOUT = "actor_rollout_ref.rollout"
_DRAW = f"{_ROLLOUT}.val_kwargs"


def _overlong(c: Any) -> dict[str, Any]:
    buffer = c.reward.reward_kwargs.get("overlong_buffer_cfg") or {}
    return buffer if isinstance(buffer, dict) and buffer.get("enable") else {}


def _resume_folder_is_bad(c: Any, given: set[str]) -> bool:
    if c.trainer.resume_mode != "resume_path" or c.trainer.resume_from_path is None:
        return False
    folder = Path(c.trainer.resume_from_path).expanduser()
    return "global_step_" not in folder.name or not folder.is_dir()


def _judges_at_a_service(c: Any) -> bool:
    model = c.reward.reward_model
    return bool(model.judge_template) and model.rollout.name in ("http", "sglang")


_OFFLOAD_SETTINGS = {
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
    "overlap_cpu_optimizer_d2h_h2d",
    "use_precision_aware_optimizer",
    "pin_cpu_grads",
    "pin_cpu_params",
    "main_grads_dtype",
    "main_params_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
}


def _optimizer_settings(optim: str) -> Rule:
    """Megatron's memory settings can be left out without changing a result; anything else there would be lost."""
    key = f"{optim}.override_optimizer_config"

    def lost(c: Any) -> list[str]:
        return sorted(set(value_in(c, key) or {}) - _OFFLOAD_SETTINGS)

    return Rule(
        key,
        "error",
        lambda c, given: bool(lost(c)),
        lambda c: f"{key}.{lost(c)[0]} is not read: this optimizer is set by the keys of {optim} alone. Remove it.",
    )


def _adapter_is_missing(model: str) -> Rule:
    """Adapters give their rank themselves (follows.py); without one there is nothing to start from."""
    key = f"{model}.lora_adapter_path"
    return Rule(
        key,
        "error",
        lambda c, given: (
            bool(value_in(c, key))
            and value_in(c, f"{model}.lora_rank") <= 0
            and (model != "critic.model" or uses_critic(c))
        ),
        lambda c: (
            f"{key}={value_in(c, key)} is no folder with adapters (adapter_config.json with a rank r). Correct it, or "
            "remove it to train without them."
        ),
    )


RUNS = [
    _adapter_is_missing("actor_rollout_ref.model"),
    _adapter_is_missing("critic.model"),
    _optimizer_settings("actor_rollout_ref.actor.optim"),
    _optimizer_settings("critic.optim"),
    Rule(
        f"{_ROLLOUT}.batch_invariant",
        "error",
        lambda c, given: (
            c.actor_rollout_ref.rollout.batch_invariant == "require" and c.actor_rollout_ref.rollout.name != "native"
        ),
        "actor_rollout_ref.rollout.batch_invariant=require cannot be kept by actor_rollout_ref.rollout.name={rollout.name}: "
        "nothing was proven about its kernels. Set batch_invariant=auto, or name=native.",
    ),
    Rule(
        f"{_DRAW}.temperature",
        "error",
        lambda c, given: (
            c.actor_rollout_ref.rollout.val_kwargs.do_sample and c.actor_rollout_ref.rollout.val_kwargs.temperature == 0
        ),
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True needs a temperature above 0. Set "
        "actor_rollout_ref.rollout.val_kwargs.temperature, or do_sample=False.",
    ),
    Rule(
        f"{_DRAW}.n",
        "warning",
        lambda c, given: (
            not c.actor_rollout_ref.rollout.val_kwargs.do_sample and c.actor_rollout_ref.rollout.val_kwargs.n > 1
        ),
        "actor_rollout_ref.rollout.val_kwargs.n={draw.n} draws equal samples, because validation decodes greedily. Set "
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True and its temperature.",
    ),
    Rule(
        f"{_ROLLOUT}.do_sample",
        "warning",
        lambda c, given: (
            c.actor_rollout_ref.rollout.n > 1
            and not (c.actor_rollout_ref.rollout.do_sample and c.actor_rollout_ref.rollout.temperature > 0)
        ),
        "actor_rollout_ref.rollout.n={rollout.n} draws equal samples, because rollout decodes greedily. Set "
        "actor_rollout_ref.rollout.do_sample=True and a temperature above 0.",
    ),
    Rule(
        "reward.reward_kwargs",
        "error",
        lambda c, given: bool(_overlong(c)) and c.reward.reward_manager.name in ("naive", "batch", "prime", "gdpo"),
        "reward.reward_kwargs.overlong_buffer_cfg is not read by the reward manager "
        "'{c.reward.reward_manager.name}'. Set reward.reward_manager.name=dapo.",
    ),
    Rule(
        "reward.reward_kwargs",
        "error",
        lambda c, given: (
            bool(_overlong(c))
            and not 0
            < (_overlong(c).get("len") or 0)
            <= (c.reward.reward_kwargs.get("max_resp_len") or c.actor_rollout_ref.rollout.response_length)
        ),
        "reward.reward_kwargs.overlong_buffer_cfg.len must be above 0 and at most the longest response (max_resp_len).",
    ),
    Rule(
        "reward.reward_manager.module.path",
        "error",
        lambda c, given: c.reward.reward_manager.source == "importlib" and c.reward.reward_manager.module.path is None,
        "reward.reward_manager.source=importlib needs reward.reward_manager.module.path, the file or module of "
        "the class.",
    ),
    Rule(
        f"{_ROLLOUT}.prefetch_num",
        "error",
        lambda c, given: (
            not 0 <= c.actor_rollout_ref.rollout.prefetch_num <= c.trainer.v1.sampler.max_off_policy_threshold
        ),
        "actor_rollout_ref.rollout.prefetch_num={rollout.prefetch_num} makes samples that are so many weight versions old "
        "when they train; it must lie between 0 and trainer.v1.sampler.max_off_policy_threshold="
        "{c.trainer.v1.sampler.max_off_policy_threshold}.",
    ),
    Rule(
        f"{_ROLLOUT}.partial_rollout",
        "error",
        lambda c, given: c.actor_rollout_ref.rollout.partial_rollout and bool(c.actor_rollout_ref.rollout.stop),
        "actor_rollout_ref.rollout.partial_rollout=True does not go with stop strings, which may lie across two parts. Use "
        "actor_rollout_ref.rollout.stop_token_ids.",
    ),
    Rule(
        "reward.reward_model.model_path",
        "error",
        lambda c, given: (
            c.reward.reward_model.enable and not c.reward.reward_model.model_path and not _judges_at_a_service(c)
        ),
        "reward.reward_model.enable=True needs reward.reward_model.model_path, a folder or hub name.",
    ),
    Rule(
        "reward.reward_model.rollout.name",
        "error",
        lambda c, given: (
            c.reward.reward_model.enable
            and c.reward.reward_model.rollout.name == "http"
            and not c.reward.reward_model.judge_template
        ),
        "reward.reward_model.rollout.name=http asks a service in words, and a classifier runs in the scoring process. Set "
        "reward.reward_model.judge_template, or remove the name.",
    ),
    Rule(
        "trainer.resume_from_path",
        "error",
        lambda c, given: c.trainer.resume_mode == "resume_path" and c.trainer.resume_from_path is None,
        "trainer.resume_mode=resume_path needs trainer.resume_from_path, a folder global_step_N.",
    ),
    Rule(
        "trainer.resume_from_path",
        "error",
        _resume_folder_is_bad,
        "trainer.resume_from_path={c.trainer.resume_from_path} is not an existing folder named global_step_N.",
    ),
]
