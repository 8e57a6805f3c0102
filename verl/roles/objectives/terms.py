"""Parts that objectives share."""

from __future__ import annotations

import torch

from verl.algorithms.reduce import Aggregate, agg_loss
from verl.engines.api import BatchTotals


def aggregate(mode: str, scale: float, totals: BatchTotals) -> Aggregate:
    """The reduction of a loss matrix [batch, response] by `mode`, divided by the `totals` of the whole mini-batch; `scale` is
    the constant divisor of seq-mean-token-sum-norm."""

    def agg(matrix: torch.Tensor, mask: torch.Tensor, mode_override: str | None = None, /) -> torch.Tensor:
        return agg_loss(
            matrix,
            mask,
            mode_override or mode,
            batch_num_tokens=totals.num_tokens,
            global_batch_size=totals.num_sequences,
            loss_scale_factor=scale,
        )

    return agg


def zero_or_nan(outputs: torch.Tensor) -> torch.Tensor:
    """0, or NaN where the model's outputs are not all finite: a clipped loss may hide that, and the step must not be taken."""
    return (outputs.detach() * 0.0).sum()
