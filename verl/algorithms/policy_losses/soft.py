"""Losses without a hard clip: SAPO, GPG, DRO."""

import torch
from torch import Tensor

from verl.algorithms.policy_losses.terms import old_policy_kl, probability_ratio, weighted, zero_without_advantage
from verl.algorithms.reduce import Aggregate
from verl.data_proto.metrics import Metric
from verl.errors import ConfigError


@zero_without_advantage
def sapo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    agg: Aggregate,
    rollout_is_weights: Tensor | None = None,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> tuple[Tensor, dict[str, Metric]]:
    """SAPO (2511.20347): -A sigmoid(tau (r - 1)) 4 / tau with tau = tau_pos where A > 0, else tau_neg.

    Always averaged as seq-mean-token-mean. Metrics: ppo_kl. Raises ConfigError unless both temperatures are positive.
    """
    if tau_pos <= 0 or tau_neg <= 0:
        raise ConfigError(f"actor.tau_pos={tau_pos} and actor.tau_neg={tau_neg} must both be greater than 0.")
    ratio = probability_ratio(log_prob, old_log_prob)
    tau = torch.where(advantages > 0, tau_pos, tau_neg).to(log_prob.dtype)
    losses = -advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    metrics = {"ppo_kl": old_policy_kl(log_prob, old_log_prob, response_mask)}
    return agg(weighted(losses, rollout_is_weights), response_mask, "seq-mean-token-mean"), metrics


@zero_without_advantage
def gpg(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    agg: Aggregate,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Metric]]:
    """Group policy gradient (2504.02546): -log_prob A. No ratio, no metrics."""
    return agg(weighted(-log_prob * advantages, rollout_is_weights), response_mask), {}


def dro(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    agg: Aggregate,
    rollout_is_weights: Tensor | None = None,
    dro_beta: float | None = None,
) -> tuple[Tensor, dict[str, Metric]]:
    """Direct reward optimization (2405.19107): -(log_prob A - beta / 2 (log_prob - old_log_prob)^2).

    Metrics: ppo_kl. Raises ConfigError unless dro_beta > 0.
    """
    if dro_beta is None or dro_beta <= 0:
        raise ConfigError(f"The policy loss 'dro' needs actor.policy_loss.dro_beta > 0; it is {dro_beta}.")
    losses = -(log_prob * advantages - 0.5 * dro_beta * (log_prob - old_log_prob).square())
    metrics = {"ppo_kl": old_policy_kl(log_prob, old_log_prob, response_mask)}
    return agg(weighted(losses, rollout_is_weights), response_mask), metrics
