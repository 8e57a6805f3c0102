"""Values that must lie in a range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl.config.rules.api import Rule
from verl.config.unavailable import value_in

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_DRAW = f"{_ROLLOUT}.val_kwargs"


def _range(key: str, inside: Callable[[Any], bool], words: str) -> Rule:
    def broken(root: Any, given: set[str]) -> bool:
        value = value_in(root, key)
        return value is not None and not inside(value)

    return Rule(key, "error", broken, lambda root: f"{key}={value_in(root, key)} must be {words}.")


def _at_least(bound: float, *keys: str) -> list[Rule]:
    return [_range(key, lambda v: v >= bound, f"at least {bound}") for key in keys]


def _above(bound: float, *keys: str) -> list[Rule]:
    return [_range(key, lambda v: v > bound, f"above {bound}") for key in keys]


RANGES = [
    *_at_least(
        1,
        "data.train_batch_size",
        "data.gen_batch_size",
        "data.val_batch_size",
        "data.max_prompt_length",
        "data.max_response_length",
        f"{_ACTOR}.ppo_mini_batch_size",
        f"{_ACTOR}.ppo_micro_batch_size",
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
        f"{_ACTOR}.ppo_max_token_len_per_gpu",
        f"{_ACTOR}.ppo_epochs",
        "critic.ppo_mini_batch_size",
        "critic.ppo_micro_batch_size_per_gpu",
        "critic.ppo_max_token_len_per_gpu",
        "critic.ppo_epochs",
        f"{_ROLLOUT}.n",
        f"{_ROLLOUT}.response_length",
        f"{_ROLLOUT}.max_num_seqs",
        f"{_ROLLOUT}.max_num_batched_tokens",
        f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu",
        f"{_ROLLOUT}.log_prob_max_token_len_per_gpu",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
        f"{_DRAW}.n",
        f"{_DRAW}.max_new_tokens",
        "reward.num_workers",
        "reward.reward_model.reward_batch_size",
        "trainer.total_epochs",
        "trainer.total_training_steps",
        "trainer.nnodes",
        "trainer.max_actor_ckpt_to_keep",
        "trainer.max_critic_ckpt_to_keep",
    ),
    *_at_least(
        0,
        f"{_ROLLOUT}.temperature",
        f"{_DRAW}.temperature",
        f"{_ACTOR}.clip_ratio",
        f"{_ACTOR}.clip_ratio_low",
        f"{_ACTOR}.clip_ratio_high",
        f"{_ACTOR}.kl_loss_coef",
        f"{_ACTOR}.optim.weight_decay",
        "critic.optim.weight_decay",
        "critic.cliprange_value",
        "algorithm.kl_ctrl.kl_coef",
        "algorithm.filter_groups.max_num_gen_batches",
        "trainer.critic_warmup",
        "trainer.min_free_disk_gb",
        "trainer.n_gpus_per_node",
        "trainer.log_val_generations",
        "reward.max_processes",
        "trainer.max_restarts",
        f"{_ROLLOUT}.max_engine_restarts",
        "trainer.restart_backoff_s",
        "trainer.hang_timeout_s",
    ),
    *_above(
        0,
        f"{_ACTOR}.optim.lr",
        "critic.optim.lr",
        f"{_ACTOR}.optim.clip_grad",
        "critic.optim.clip_grad",
        f"{_ACTOR}.tau_pos",
        f"{_ACTOR}.tau_neg",
        f"{_ACTOR}.loss_scale_factor",
        f"{_ACTOR}.policy_loss.dro_beta",
        "algorithm.kl_ctrl.horizon",
        "algorithm.kl_ctrl.target_kl",
        "reward.timeout_s",
        "reward.memory_mb",
        "reward.cpu_s",
        "reward.max_file_mb",
    ),
    *_above(1, f"{_ACTOR}.clip_ratio_c"),
    *_at_least(32, "reward.max_open_files"),  # fewer, and Python itself does not start
    *(
        _range(key, lambda v: 0 < v <= 1, "above 0 and at most 1 (1: all tokens)")
        for key in (f"{_ROLLOUT}.top_p", f"{_DRAW}.top_p")
    ),
    *(
        _range(key, lambda v: v == -1 or v >= 1, "-1 (all tokens) or at least 1")
        for key in (f"{_ROLLOUT}.top_k", f"{_DRAW}.top_k")
    ),
    *(_range(key, lambda v: 0 <= v < 1, "at least 0 and below 1") for key in (f"{_ROLLOUT}.min_p", f"{_DRAW}.min_p")),
    *(
        _range(key, lambda v: 0 <= v <= 1, "between 0 and 1")
        for key in (
            "algorithm.gamma",
            "algorithm.lam",
            f"{_ACTOR}.optim.lr_warmup_steps_ratio",
            f"{_ACTOR}.optim.min_lr_ratio",
            "critic.optim.lr_warmup_steps_ratio",
            "critic.optim.min_lr_ratio",
        )
    ),
    *(
        _range(key, lambda v: len(v) == 2 and all(0 <= b < 1 for b in v), "two numbers from 0 up to, not including, 1")
        for key in (f"{_ACTOR}.optim.betas", "critic.optim.betas")
    ),
]
