"""Our estimators and losses as functions of the older contract (see verl.algorithms.user_functions)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from typing import Any

from torch import Tensor

from verl.algorithms.advantages import ADVANTAGES, COLUMN_ARGUMENTS, compute_advantage
from verl.algorithms.losses import compute_value_loss
from verl.algorithms.policy_losses import POLICY_LOSSES, policy_loss
from verl.algorithms.user_functions import ConfigView, agg_loss
from verl.data_proto.metrics import metric_values


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
    # a run asks a function's signature which columns it needs, also where this one is registered under another name
    estimator.__wrapped__ = built_in  # type: ignore[attr-defined]
    return estimator


def older_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor]:
    """compute_value_loss with its own denominators: (loss, fraction of clipped tokens)."""

    def agg(loss_mat: Tensor, loss_mask: Tensor, mode_override: str | None = None, /) -> Tensor:
        return agg_loss(loss_mat, loss_mask, mode_override or loss_agg_mode)

    loss, metrics = compute_value_loss(vpreds, returns, values, response_mask, cliprange_value, agg)
    return loss, loss.new_tensor(metrics["vf_clipfrac"].value)
