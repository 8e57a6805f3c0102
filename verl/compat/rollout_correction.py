"""`verl.trainer.ppo.rollout_corr_helper`: importance weights and rejection between trainer and sampler, on a batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from verl.algorithms.correction import rollout_correction
from verl.algorithms.correction.diagnostics import gap_metrics
from verl.algorithms.user_functions import ConfigView
from verl.data_proto.metrics import metric_values
from verl.data_proto.proto import DataProto
from verl.errors import ConfigError

_SETTINGS = (
    "rollout_is",
    "rollout_is_threshold",
    "rollout_rs",
    "rollout_rs_threshold",
    "rollout_is_batch_normalize",
)


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, **settings: Any
) -> tuple[DataProto | None, Tensor, dict[str, float]]:
    """(a batch with the column rollout_is_weights, or None without `rollout_is`; the mask without rejected tokens; metrics
    rollout_corr/*). `settings` are the keys of algorithm.rollout_correction. Raises ConfigError."""
    found = rollout_correction(old_log_prob, rollout_log_prob, response_mask, **settings)
    weights = None if found.weights is None else DataProto.from_dict({"rollout_is_weights": found.weights})
    return weights, found.response_mask, metric_values(found.metrics)


def compute_rollout_correction_and_add_to_batch(
    batch: DataProto, rollout_corr_config: Any
) -> tuple[DataProto, dict[str, float]]:
    """Put `rollout_is_weights` (with `rollout_is`) and the `response_mask` without rejected tokens into the batch, which has
    old_log_probs, rollout_log_probs and response_mask. Returns the batch and metrics rollout_corr/*."""
    section, columns = ConfigView(rollout_corr_config, {}), batch.batch
    settings = {name: section.get(name) for name in _SETTINGS if section.get(name) is not None}
    weights, columns["response_mask"], metrics = compute_rollout_correction_and_rejection_mask(
        columns["old_log_probs"], columns["rollout_log_probs"], columns["response_mask"], **settings
    )
    return (batch if weights is None else batch.union(weights)), metrics


def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor
) -> dict[str, float]:
    """kl, k3_kl, perplexities and chi2 between trainer and sampler; {} without the sampler's log-probs."""
    if rollout_log_prob is None:
        return {}
    return metric_values(gap_metrics(old_log_prob, rollout_log_prob, response_mask.bool()))


def apply_bypass_mode(batch: DataProto, rollout_corr_config: Any = None, policy_loss_config: Any = None) -> None:
    """Take the sampler for the old policy: `old_log_probs` become `rollout_log_probs`, and `policy_loss_config` the loss
    `bypass_mode` with these settings. Raises ConfigError when the batch has no rollout_log_probs."""
    if "rollout_log_probs" not in batch.batch.keys():
        raise ConfigError(
            "bypass_mode takes the sampler's log-probs as the old ones, but the batch has no rollout_log_probs. Set "
            "actor_rollout_ref.rollout.calculate_log_probs=True."
        )
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
    if policy_loss_config is None:
        return
    from omegaconf import OmegaConf, open_dict

    if OmegaConf.is_config(policy_loss_config):
        with open_dict(policy_loss_config):
            policy_loss_config["rollout_correction"] = rollout_corr_config
    else:
        policy_loss_config["rollout_correction"] = rollout_corr_config
    policy_loss_config["loss_mode"] = "bypass_mode"


apply_rollout_correction = apply_bypass_mode
