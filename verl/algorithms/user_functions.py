"""Users' estimators and losses written to the older contract.

A loss of that contract is `fn(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config,
rollout_is_weights) -> (loss, metrics)` and calls `agg_loss` itself, often without the totals of the mini-batch. While
`call_policy_loss` runs it, such calls get the totals of the mini-batch, so that the micro-batch split does not change a
user's loss.
"""

import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from verl.algorithms import reduce
from verl.algorithms.reduce import Aggregate
from verl.data_proto.metrics import Metric
from verl.errors import ConfigError
from verl.user_objects import require_call

_ABSENT = object()
_agg_in_force: ContextVar[Aggregate | None] = ContextVar("agg_in_force", default=None)


class ConfigView:
    """Config section (dataclass, mapping or None) with attributes, `[]` and `.get`, as the older contract reads it."""

    def __init__(self, section: object, extra: Mapping[str, object]):
        self._section = section
        self._extra = dict(extra)

    def get(self, key: str, default: object = None) -> Any:
        if key in self._extra:
            return self._extra[key]
        if isinstance(self._section, Mapping):
            return self._section.get(key, default)
        return getattr(self._section, key, default)

    def __getitem__(self, key: str) -> Any:
        value = self.get(key, _ABSENT)
        if value is _ABSENT:
            raise KeyError(key)
        return value

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_"):
            raise AttributeError(key)
        value = self.get(key, _ABSENT)
        if value is _ABSENT:
            raise AttributeError(f"the config section has no key {key!r}")
        return value

    def __contains__(self, key: str) -> bool:
        return self.get(key, _ABSENT) is not _ABSENT

    def unwrap(self) -> tuple[object, dict[str, object]]:
        """The section, and the values that override it."""
        return self._section, dict(self._extra)


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: float | None = None,
    global_batch_size: float | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """verl.algorithms.reduce.agg_loss with the totals of the mini-batch inside a user's policy loss."""
    agg = _agg_in_force.get()
    if agg is not None and batch_num_tokens is None and global_batch_size is None:
        return agg(loss_mat, loss_mask, loss_agg_mode)
    return reduce.agg_loss(
        loss_mat, loss_mask, loss_agg_mode, dp_size, batch_num_tokens, global_batch_size, loss_scale_factor
    )


_LOSS_ARGUMENTS = "old_log_prob log_prob advantages response_mask loss_agg_mode config rollout_is_weights".split()


def require_loss_arguments(name: str, loss_fn: Callable[..., object]) -> None:
    """Raises ConfigError for a loss of the older contract that needs a missing argument."""
    parameters = inspect.signature(loss_fn).parameters
    if "agg" not in parameters:
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        chosen = [argument for argument in _LOSS_ARGUMENTS if takes_all or argument in parameters]
        require_call(f"The policy loss {name!r}", loss_fn, keywords=chosen)


def call_policy_loss(
    name: str,
    loss_fn: Callable[..., object],
    inputs: Mapping[str, Tensor],
    agg: Aggregate,
    rollout_is_weights: Tensor | None,
    settings: Mapping[str, object],
    config: object,
) -> tuple[Tensor, dict[str, Metric]]:
    """Call a user's loss of the older contract.

    Raises ConfigError when it does not take the given importance weights, or does not return (loss, dict).
    """
    log_prob, mask = inputs["log_prob"], inputs["response_mask"].to(inputs["log_prob"].dtype)
    offered = {
        **inputs,
        "response_mask": mask,
        "loss_agg_mode": settings.get("loss_agg_mode") or "token-mean",
        "config": ConfigView(config, {"global_batch_info": {}}),
        "rollout_is_weights": rollout_is_weights,
    }
    parameters = inspect.signature(loss_fn).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if rollout_is_weights is not None and not (takes_all or "rollout_is_weights" in parameters):
        raise ConfigError(
            f"The policy loss '{name}' has no argument rollout_is_weights; add it, "
            "or set algorithm.rollout_correction.rollout_is=null."
        )
    token = _agg_in_force.set(agg)
    try:
        output = loss_fn(**{k: v for k, v in offered.items() if takes_all or k in parameters})
    finally:
        _agg_in_force.reset(token)
    if not (isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], Mapping)):
        raise ConfigError(f"The policy loss '{name}' must return (loss, metrics), a scalar tensor and a dict.")
    loss, metrics = output
    if not isinstance(loss, Tensor) or loss.shape != log_prob.new_empty(()).shape:
        raise ConfigError(f"The policy loss '{name}' must return a scalar tensor as its loss; reduce it with agg_loss.")
    named = {name: v if isinstance(v, Metric) else Metric.mean(v, mask.sum()) for name, v in metrics.items()}
    return loss, {name.removeprefix("actor/"): metric for name, metric in named.items()}
