"""Reduction of a matrix of token losses to a scalar."""

from typing import Protocol

from torch import Tensor

from verl.algorithms.masked import masked_sum
from verl.errors import ConfigError, nearest
from verl.families import LOSS_AGG_MODES


class Aggregate(Protocol):
    """`agg_loss` with mode and mini-batch totals bound; a loss may override the mode."""

    def __call__(self, loss_mat: Tensor, loss_mask: Tensor, mode_override: str | None = None, /) -> Tensor: ...


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """Reduce token losses [batch, response] to a scalar.

    token-mean                sum(l m) / N_tokens
    token-sum                 sum(l m)
    seq-mean-token-sum        sum_i [sum_t l m] / N_sequences
    seq-mean-token-sum-norm   the same, divided by `loss_scale_factor`, or by the padded width when that is None
                              (Dr. GRPO, 2503.20783; the width depends on padding, so give the factor)
    seq-mean-token-mean       sum_i [sum_t l m / (len_i + 1e-8)] / N_sequences

    `batch_num_tokens` and `global_batch_size` are the totals of the mini-batch over all ranks: with them the losses of
    micro-batches add up to the loss of the mini-batch. Without them the denominators are counted in this matrix (sequences:
    rows with at least one token). The factor `dp_size` cancels the averaging of gradients over ranks.

    Raises ConfigError on an unknown mode, ValueError when dp_size > 1 comes without the total it needs.
    """
    if loss_agg_mode not in LOSS_AGG_MODES:
        hint = nearest(loss_agg_mode, LOSS_AGG_MODES) or "; there are " + ", ".join(LOSS_AGG_MODES)
        raise ConfigError(f"There is no loss_agg_mode {loss_agg_mode!r}{hint}")
    if loss_agg_mode == "token-sum":
        return masked_sum(loss_mat, loss_mask) * dp_size
    if loss_agg_mode == "token-mean":
        num_tokens = _total(batch_num_tokens, loss_mask.sum(), dp_size, "batch_num_tokens")
        return masked_sum(loss_mat, loss_mask) / num_tokens * dp_size
    lengths = loss_mask.to(loss_mat.dtype).sum(-1)
    row_losses = masked_sum(loss_mat, loss_mask, -1)
    if loss_agg_mode == "seq-mean-token-mean":
        row_losses = row_losses / (lengths + 1e-8)
    if loss_agg_mode == "seq-mean-token-sum-norm":
        row_losses = row_losses / (loss_scale_factor or loss_mask.shape[-1])
    num_sequences = _total(global_batch_size, (lengths > 0).sum(), dp_size, "global_batch_size")
    return row_losses.sum() / num_sequences * dp_size


def _total(total: float | Tensor | None, local: Tensor, dp_size: int, name: str) -> float | Tensor:
    if total is not None:
        return total
    if dp_size > 1:
        raise ValueError(f"agg_loss with dp_size={dp_size} needs {name} of the whole batch; pass it.")
    return local.clamp(min=1)  # an empty micro-batch has loss 0, not NaN
