"""What the policy losses have in common: the ratio and weights on a loss matrix."""

from __future__ import annotations

from torch import Tensor

from verl.algorithms.masked import token_mean
from verl.data_proto.metrics import Metric

LOG_RATIO_LIMIT = 20.0  # e**20: keeps a ratio finite in float32 and its square too


def probability_ratio(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """exp(clamp(log_prob - old_log_prob, -20, 20)). [batch, response]"""
    return (log_prob - old_log_prob).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def weighted(loss_mat: Tensor, rollout_is_weights: Tensor | None) -> Tensor:
    """The loss matrix times the importance weights of trainer over sampler, if there are any."""
    return loss_mat if rollout_is_weights is None else loss_mat * rollout_is_weights


def old_policy_kl(log_prob: Tensor, old_log_prob: Tensor, response_mask: Tensor) -> Metric:
    """Mean of old_log_prob - log_prob over tokens: KL(old || current), estimated on samples of the old policy."""
    return token_mean(old_log_prob - log_prob, response_mask)
