"""A door: the names that recipes import from here. The code is in verl.algorithms."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from torch import Tensor

from verl.algorithms.advantages import register_adv_est
from verl.algorithms.entropy import compute_entropy_loss
from verl.algorithms.kl import AdaptiveKLController, FixedKLController, KLController, kl_penalty, make_kl_controller
from verl.algorithms.older_contract import older_value_loss
from verl.algorithms.policy_losses import register_policy_loss
from verl.algorithms.user_functions import ConfigView, agg_loss
from verl.compat.registries import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY


class AdvantageEstimator(str, Enum):
    """Names of the built-in estimators; a member is its string."""

    GAE = "gae"
    GRPO = "grpo"
    GRPO_VECTORIZED = "grpo_vectorized"
    GDPO = "gdpo"
    GRPO_PASSK = "grpo_passk"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    RLOO = "rloo"
    RLOO_VECTORIZED = "rloo_vectorized"
    OPO = "opo"
    GPG = "gpg"
    OPTIMAL_TOKEN_BASELINE = "optimal_token_baseline"
    TIR_OPTIMAL_TOKEN_BASELINE = "tir_optimal_token_baseline"

    def __str__(self) -> str:
        return str(self.value)


def get_adv_estimator_fn(name_or_enum: str | AdvantageEstimator) -> Callable[..., tuple[Tensor, Tensor]]:
    """The estimator, called by keyword: token_level_rewards, response_mask, index, config, ..."""
    return ADV_ESTIMATOR_REGISTRY.find(name_or_enum)


def get_policy_loss_fn(name: str) -> Callable[..., tuple[Tensor, dict[str, Any]]]:
    """The loss as fn(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights)."""
    return POLICY_LOSS_REGISTRY.find(name)


def get_kl_controller(kl_ctrl: Any) -> KLController:
    """The controller of a section with type, kl_coef, target_kl and horizon."""
    section = ConfigView(kl_ctrl, {})
    return make_kl_controller(
        section.get("type", "fixed"), section.kl_coef, section.get("target_kl", 0.1), section.get("horizon", 10000)
    )


_ESTIMATORS = dict(ADV_ESTIMATOR_REGISTRY)  # before a recipe replaces one
_LOSSES = dict(POLICY_LOSS_REGISTRY)

compute_gae_advantage_return = _ESTIMATORS["gae"]
compute_grpo_outcome_advantage = _ESTIMATORS["grpo"]
compute_grpo_vectorized_outcome_advantage = _ESTIMATORS["grpo_vectorized"]
compute_gdpo_outcome_advantage = _ESTIMATORS["gdpo"]
compute_grpo_passk_outcome_advantage = _ESTIMATORS["grpo_passk"]
compute_reinforce_plus_plus_outcome_advantage = _ESTIMATORS["reinforce_plus_plus"]
compute_reinforce_plus_plus_baseline_outcome_advantage = _ESTIMATORS["reinforce_plus_plus_baseline"]
compute_remax_outcome_advantage = _ESTIMATORS["remax"]
compute_rloo_outcome_advantage = _ESTIMATORS["rloo"]
compute_rloo_vectorized_outcome_advantage = _ESTIMATORS["rloo_vectorized"]
compute_opo_outcome_advantage = _ESTIMATORS["opo"]
compute_gpg_outcome_advantage = _ESTIMATORS["gpg"]
compute_optimal_token_baseline_advantage = _ESTIMATORS["optimal_token_baseline"]
compute_multi_turn_optimal_token_baseline_advantage = _ESTIMATORS["tir_optimal_token_baseline"]

compute_policy_loss_vanilla = _LOSSES["vanilla"]
compute_policy_loss_dppo_tv = _LOSSES["dppo_tv"]
compute_policy_loss_dppo_kl = _LOSSES["dppo_kl"]
compute_policy_loss_gspo = _LOSSES["gspo"]
compute_policy_loss_sapo = _LOSSES["sapo"]
compute_policy_loss_gpg = _LOSSES["gpg"]
compute_policy_loss_clip_cov = _LOSSES["clip_cov"]
compute_policy_loss_kl_cov = _LOSSES["kl_cov"]
compute_policy_loss_geo_mean = _LOSSES["geo_mean"]
compute_policy_loss_dro = _LOSSES["dro"]
compute_policy_loss_cispo = _LOSSES["cispo"]
compute_policy_loss_bypass_mode = _LOSSES["bypass_mode"]
compute_value_loss = older_value_loss

__all__ = [
    "ADV_ESTIMATOR_REGISTRY",
    "POLICY_LOSS_REGISTRY",
    "AdaptiveKLController",
    "AdvantageEstimator",
    "FixedKLController",
    "agg_loss",
    "compute_entropy_loss",
    "compute_gae_advantage_return",
    "compute_gdpo_outcome_advantage",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_grpo_vectorized_outcome_advantage",
    "compute_multi_turn_optimal_token_baseline_advantage",
    "compute_opo_outcome_advantage",
    "compute_optimal_token_baseline_advantage",
    "compute_policy_loss_bypass_mode",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_dppo_kl",
    "compute_policy_loss_dppo_tv",
    "compute_policy_loss_dro",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_sapo",
    "compute_policy_loss_vanilla",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "compute_rloo_vectorized_outcome_advantage",
    "compute_value_loss",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_policy_loss_fn",
    "kl_penalty",
    "register_adv_est",
    "register_policy_loss",
]
