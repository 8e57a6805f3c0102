"""Token losses of supervised fine-tuning: negative log-likelihood (nll) and dynamic fine-tuning (dft)."""

from collections.abc import Callable

import torch
from torch import Tensor

from verl.algorithms.reduce import Aggregate


def nll(log_prob: Tensor, loss_mask: Tensor, agg: Aggregate) -> Tensor:
    """Negative log-likelihood -log p, reduced by `agg` to a scalar.

    `log_prob` [batch, response] is log p of the target tokens, `loss_mask` [batch, response] is true on the tokens
    that train.
    """
    return agg(-log_prob, loss_mask)


def dft(log_prob: Tensor, loss_mask: Tensor, agg: Aggregate) -> Tensor:
    """Dynamic fine-tuning, -stopgrad(p) log p, reduced by `agg` (2508.05629). Arguments as for `nll`."""
    log_prob = torch.where(loss_mask.bool(), log_prob, 0.0)  # 0 * NaN outside the mask would reach the gradient
    return agg(-log_prob.detach().exp() * log_prob, loss_mask)


SFT_LOSSES: dict[str, Callable[[Tensor, Tensor, Aggregate], Tensor]] = {"nll": nll, "dft": dft}
