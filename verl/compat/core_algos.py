"""Estimators, losses and KL controllers in the older contract (see verl.algorithms.user_functions), by name and as registries:
`verl.trainer.ppo.core_algos`.

The registries are the ones that runs read. A built-in row is returned as a function of the older contract; a function that a
script has registered is returned unchanged.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms import losses
from verl.algorithms.advantages import ADVANTAGES, COLUMN_ARGUMENTS, compute_advantage
from verl.algorithms.kl import KLController, make_kl_controller
from verl.algorithms.policy_losses import POLICY_LOSSES, policy_loss
from verl.algorithms.user_functions import ConfigView, agg_loss
from verl.compat import tensors as verl_F
from verl.data_proto.metrics import metric_values
from verl.registry import RegistryMapping

__all__ = ["defaultdict", "np", "torch", "verl_F"]  # a star import of scripts gives them


def settings_of(config: object) -> dict[str, Any]:
    """Flat keys that losses read, from an actor section (dataclass or mapping) and its policy_loss and rollout_correction."""
    if config is None:
        return {}
    flat = _as_dict(config)
    for node in ("policy_loss", "rollout_correction"):
        flat.update(_as_dict(flat.get(node)))
    return flat


def _as_dict(section: object) -> dict[str, object]:
    if section is None:
        return {}
    if isinstance(section, ConfigView):  # a run calls a built-in that is registered under another name
        inner, extra = section.unwrap()
        return {**_as_dict(inner), **extra}
    if is_dataclass(section) and not isinstance(section, type):
        return asdict(section)
    if hasattr(section, "items"):
        return dict(section.items())
    return dict(vars(section))


def older_policy_loss(name: str) -> Callable[..., tuple[Tensor, dict[str, Any]]]:
    """The built-in loss `name` as a function of the older contract; metrics are plain numbers named actor/*."""
    built_in = POLICY_LOSSES.declared(name)

    def loss_fn(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: object = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        settings = settings_of(config)
        totals = settings.get("global_batch_info") or {}

        def agg(loss_mat: Tensor, loss_mask: Tensor, mode_override: str | None = None, /) -> Tensor:
            return agg_loss(loss_mat, loss_mask, mode_override or loss_agg_mode, **totals)

        loss, metrics = policy_loss(
            name,
            old_log_prob=old_log_prob,
            log_prob=log_prob,
            advantages=advantages,
            response_mask=response_mask,
            agg=agg,
            rollout_is_weights=rollout_is_weights,
            params={**settings, "loss_agg_mode": loss_agg_mode},
            config=config,
            loss_fn=built_in,
        )
        return loss, {f"actor/{k}": v for k, v in metric_values(metrics).items()}

    loss_fn.__name__ = loss_fn.__qualname__ = f"policy_loss_{name}"
    return loss_fn


def older_advantage(name: str, *order: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The built-in estimator `name` as a function of the older contract: token_level_rewards, response_mask, index,
    config, ... by keyword, or by position in the given `order`. gamma, lam and norm_adv_by_std_in_grpo come from
    `config` unless given."""
    built_in = ADVANTAGES.declared(name)
    order = order or ("token_level_rewards", "response_mask", "index")

    def estimator(*positional: object, **keywords: object) -> tuple[Tensor, Tensor]:
        keywords.update(zip(order, positional, strict=False))
        config = keywords.pop("config", None)
        settings = {**settings_of(config), **keywords}
        columns = {argument: settings.pop(argument, None) for argument in COLUMN_ARGUMENTS}
        return compute_advantage(name, columns, config=config, estimator=built_in, **settings)

    estimator.__name__ = estimator.__qualname__ = f"compute_{name}"
    # a run reads a function's signature for the columns it needs, also if this one is registered under another name
    estimator.__wrapped__ = built_in  # type: ignore[attr-defined]
    return estimator


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    **totals: Any,
) -> tuple[Tensor, Tensor]:
    """(loss, fraction of clipped tokens). `totals` of the mini-batch, as `agg_loss` takes them: dp_size, batch_num_tokens,
    global_batch_size, loss_scale_factor; without them the rows here are the mini-batch."""

    def agg(loss_mat: Tensor, loss_mask: Tensor, mode_override: str | None = None, /) -> Tensor:
        return agg_loss(loss_mat, loss_mask, mode_override or loss_agg_mode, **totals)

    loss, metrics = losses.compute_value_loss(vpreds, returns, values, response_mask, cliprange_value, agg)
    return loss, loss.new_tensor(metrics["vf_clipfrac"].value)


# order of the positional arguments, if it differs from `older_advantage`
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

# name in scripts, if it is not compute_{estimator}_outcome_advantage
_ESTIMATOR_FUNCTIONS = {
    "gae": "compute_gae_advantage_return",
    "optimal_token_baseline": "compute_optimal_token_baseline_advantage",
    "tir_optimal_token_baseline": "compute_multi_turn_optimal_token_baseline_advantage",
}
_FUNCTIONS = {
    **{_ESTIMATOR_FUNCTIONS.get(n, f"compute_{n}_outcome_advantage"): function for n, function in _ESTIMATORS.items()},
    **{f"compute_policy_loss_{name}": function for name, function in _LOSSES.items()},
}


def __getattr__(name: str) -> Callable[..., Any]:
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
