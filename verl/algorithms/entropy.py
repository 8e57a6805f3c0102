"""Entropy of the next-token distribution."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.reduce import agg_loss


def entropy_from_logits(logits: Tensor) -> Tensor:
    """H = logsumexp(z) - sum(softmax(z) z) in nats: [..., vocabulary] -> [...]."""
    return torch.logsumexp(logits, -1) - (logits.softmax(-1) * logits).sum(-1)


def compute_entropy_loss(logits: Tensor, response_mask: Tensor, loss_agg_mode: str = "token-mean") -> Tensor:
    """Mean entropy of `logits` [batch, response, vocabulary] over trained tokens."""
    return agg_loss(entropy_from_logits(logits), response_mask, loss_agg_mode)
