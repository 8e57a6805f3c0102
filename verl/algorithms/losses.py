"""Loss of the critic, and entropy of the next-token distribution."""

import torch
from torch import Tensor

from verl.algorithms.masked import token_mean
from verl.algorithms.reduce import Aggregate, agg_loss
from verl.data_proto.metrics import Metric


def compute_value_loss(
    vpreds: Tensor, returns: Tensor, values: Tensor, response_mask: Tensor, cliprange_value: float, agg: Aggregate
) -> tuple[Tensor, dict[str, Metric]]:
    """PPO's clipped value loss as in Baselines: 1/2 max((v - ret)^2, (clip(v, V - c, V + c) - ret)^2), reduced by `agg`.

    v is `vpreds`, the critic's current values; V is `values`, those at the start of the step, all [batch, response]; c is
    `cliprange_value`. Metrics: vf_clipfrac, vpred_mean.
    """
    clipped = torch.minimum(torch.maximum(vpreds, values - cliprange_value), values + cliprange_value)
    plain_errors, clipped_errors = (vpreds - returns).square(), (clipped - returns).square()
    loss = 0.5 * agg(torch.maximum(plain_errors, clipped_errors), response_mask)
    metrics = {
        "vf_clipfrac": token_mean(clipped_errors > plain_errors, response_mask),
        "vpred_mean": token_mean(vpreds, response_mask),
    }
    return loss, metrics


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy in nats, H = logsumexp(z) - sum(softmax(z) z): [..., vocabulary] -> [...]."""
    return torch.logsumexp(logits, -1) - (logits.softmax(-1) * logits).sum(-1)


def compute_entropy_loss(logits: Tensor, response_mask: Tensor, loss_agg_mode: str = "token-mean") -> Tensor:
    """Mean entropy of `logits` [batch, response, vocabulary] over trained tokens."""
    return agg_loss(entropy_from_logits(logits), response_mask, loss_agg_mode)
