"""What the critic minimises."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.masked import token_mean
from verl.algorithms.reduce import Aggregate
from verl.data_proto.metrics import Metric


def compute_value_loss(
    vpreds: Tensor, returns: Tensor, values: Tensor, response_mask: Tensor, cliprange_value: float, agg: Aggregate
) -> tuple[Tensor, dict[str, Metric]]:
    """1/2 max((v - ret)^2, (clip(v, V - c, V + c) - ret)^2), reduced by `agg`.

    `vpreds` v are the critic's values now, `values` V those at the start of the step, all [batch, response]; c is
    `cliprange_value`. Source: PPO's clipped value loss as in Baselines. Metrics: vf_clipfrac, vpred_mean.
    """
    clipped = torch.minimum(torch.maximum(vpreds, values - cliprange_value), values + cliprange_value)
    plain_errors, clipped_errors = (vpreds - returns).square(), (clipped - returns).square()
    loss = 0.5 * agg(torch.maximum(plain_errors, clipped_errors), response_mask)
    metrics = {
        "vf_clipfrac": token_mean(clipped_errors > plain_errors, response_mask),
        "vpred_mean": token_mean(vpreds, response_mask),
    }
    return loss, metrics
