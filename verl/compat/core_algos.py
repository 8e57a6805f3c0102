"""Estimators, losses and KL controllers in the older contract, by name and as registries: `verl.trainer.ppo.core_algos`.

The registries are the ones that runs read. A built-in row is returned as a function of the older contract
(verl/compat/algorithms.py); a function that a script has registered is returned unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from torch import Tensor

from verl.algorithms.advantages import ADVANTAGES, register_adv_est
from verl.algorithms.kl import AdaptiveKLController, FixedKLController, KLController, kl_penalty, make_kl_controller
from verl.algorithms.losses import compute_entropy_loss
from verl.algorithms.policy_losses import POLICY_LOSSES, register_policy_loss
from verl.algorithms.user_functions import ConfigView, agg_loss
from verl.compat.algorithms import older_advantage, older_policy_loss
from verl.compat.algorithms import older_value_loss as compute_value_loss
from verl.registry import RegistryMapping

__all__ = [
    "ADV_ESTIMATOR_REGISTRY",
    "POLICY_LOSS_REGISTRY",
    "AdaptiveKLController",
    "AdvantageEstimator",
    "FixedKLController",
    "agg_loss",
    "compute_entropy_loss",
    "compute_value_loss",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_policy_loss_fn",
    "kl_penalty",
    "register_adv_est",
    "register_policy_loss",
]  # and compute_*: see __getattr__

Function = Callable[..., Any]

# order of the positional arguments, where it differs from `older_advantage`
_GROUP_ORDER = ("token_level_rewards", "response_mask", "index", "epsilon", "norm_adv_by_std_in_grpo")
_ORDERS = {
    "gae": ("token_level_rewards", "values", "response_mask", "gamma", "lam"),
    **dict.fromkeys(("grpo", "grpo_vectorized", "gdpo", "grpo_passk"), _GROUP_ORDER),
    "remax": ("token_level_rewards", "reward_baselines", "response_mask"),
}
_ESTIMATORS = {name: older_advantage(name, *_ORDERS.get(name, ())) for name in ADVANTAGES.built_in}
_LOSSES = {name: older_policy_loss(name) for name in POLICY_LOSSES.built_in}
ADV_ESTIMATOR_REGISTRY = RegistryMapping(ADVANTAGES, _ESTIMATORS)
POLICY_LOSS_REGISTRY = RegistryMapping(POLICY_LOSSES, _LOSSES)

# name in scripts, where it is not compute_{estimator}_outcome_advantage
_ESTIMATOR_FUNCTIONS = {
    "gae": "compute_gae_advantage_return",
    "optimal_token_baseline": "compute_optimal_token_baseline_advantage",
    "tir_optimal_token_baseline": "compute_multi_turn_optimal_token_baseline_advantage",
}
_FUNCTIONS = {
    **{_ESTIMATOR_FUNCTIONS.get(n, f"compute_{n}_outcome_advantage"): function for n, function in _ESTIMATORS.items()},
    **{f"compute_policy_loss_{name}": function for name, function in _LOSSES.items()},
}


def __getattr__(name: str) -> Function:
    """The built-in estimators and losses as functions: compute_grpo_outcome_advantage, compute_policy_loss_gspo, ..."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Name(str, Enum):
    def __str__(self) -> str:
        return str(self.value)


# names of the built-in estimators: AdvantageEstimator.GRPO == "grpo" == str(AdvantageEstimator.GRPO)
AdvantageEstimator = _Name("AdvantageEstimator", {name.upper(): name for name in _ESTIMATORS})  # type: ignore[call-overload]


def get_adv_estimator_fn(name_or_enum: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The estimator, called by keyword: token_level_rewards, response_mask, index, config, ..."""
    return ADV_ESTIMATOR_REGISTRY[name_or_enum]  # type: ignore[no-any-return]


def get_policy_loss_fn(name: str) -> Callable[..., tuple[Tensor, dict[str, Any]]]:
    """The loss as fn(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights)."""
    return POLICY_LOSS_REGISTRY[name]  # type: ignore[no-any-return]


def get_kl_controller(kl_ctrl: object) -> KLController:
    """The controller of a section with type, kl_coef, target_kl and horizon."""
    section = ConfigView(kl_ctrl, {})
    return make_kl_controller(
        section.get("type", "fixed"), section.kl_coef, section.get("target_kl", 0.1), section.get("horizon", 10000)
    )
