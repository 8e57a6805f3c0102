"""Policy losses: functions (old_log_prob, log_prob, advantages, response_mask, *, agg, ...) -> (loss, metrics).

All tensors are [batch, response]; `agg` reduces a loss matrix (verl.algorithms.reduce.Aggregate). Further keywords are
the keys of the actor's config that the loss reads, and `rollout_is_weights`. With totals bound in `agg`, the losses of
micro-batches add up to the loss of the mini-batch; `clip_cov` and `kl_cov` are exceptions: they use statistics of the
micro-batch. `@zero_without_advantage` (terms.py) declares that rows with only advantages of 0 need not be computed. Losses of
the older contract (loss_agg_mode and config instead of agg) are called through verl.algorithms.user_functions.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from verl.algorithms.reduce import Aggregate
from verl.algorithms.user_functions import call_policy_loss
from verl.data_proto.metrics import Metric
from verl.errors import ConfigError
from verl.families import POLICY_LOSSES

F = TypeVar("F", bound=Callable[..., object])


def register_policy_loss(name: str) -> Callable[[F], F]:
    """Decorator: register a loss of either contract under `name`, a value of actor.policy_loss.loss_mode, in the place of any
    that had it."""

    def add(loss_fn: F) -> F:
        POLICY_LOSSES.set(str(getattr(name, "value", name)), loss_fn)
        return loss_fn

    return add


def policy_loss(
    name: str,
    *,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    agg: Aggregate,
    rollout_is_weights: Tensor | None = None,
    params: Mapping[str, object] | None = None,
    config: object = None,
    generator: torch.Generator | None = None,
    loss_fn: Callable[..., Any] | None = None,
) -> tuple[Tensor, dict[str, Metric]]:
    """The loss `name` and its metrics (names without prefix); `loss_fn` is its function, if not the registry's.

    `params` are the actor's keys (clip_ratio, clip_ratio_low, ..., and rollout_correction's keys for bypass_mode); a
    loss gets the keys that it reads. clip_ratio_low and clip_ratio_high default to clip_ratio. `config` is passed
    to losses of the older contract; `generator` (on the CPU) makes the random choices of clip_cov. Raises ConfigError
    when the loss is unknown, a setting is out of range, or importance weights are given to a loss that does not take
    them.
    """
    loss_fn = loss_fn or POLICY_LOSSES.get(name)
    settings = dict(params or {})
    for side in ("clip_ratio_low", "clip_ratio_high"):
        if settings.get(side) is None:
            settings[side] = settings.get("clip_ratio")
    inputs = {
        "old_log_prob": old_log_prob,
        "log_prob": log_prob,
        "advantages": advantages,
        "response_mask": response_mask,
    }
    parameters = inspect.signature(loss_fn).parameters
    if "agg" not in parameters:
        return call_policy_loss(name, loss_fn, inputs, agg, rollout_is_weights, settings, config)
    if rollout_is_weights is not None:
        if "rollout_is_weights" not in parameters:
            raise ConfigError(
                f"The policy loss '{name}' does not take importance weights; "
                "set algorithm.rollout_correction.rollout_is=null or choose another actor.policy_loss.loss_mode."
            )
        settings["rollout_is_weights"] = rollout_is_weights
    settings["generator"] = generator
    chosen = {k: v for k, v in settings.items() if k in parameters and v is not None}
    return cast("tuple[Tensor, dict[str, Metric]]", loss_fn(**inputs, agg=agg, **chosen))
