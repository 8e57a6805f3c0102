"""Sums, means and whitening over a mask. Values outside the mask have no effect, not even NaN."""

import numpy as np
import torch
from torch import Tensor

from verl.data_proto.batch_metrics import is_in_memory
from verl.data_proto.metrics import Metric


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of `values` where `mask` is true, over `dim` or over everything."""
    selected = torch.where(mask.bool(), values, 0.0)
    return selected.sum() if dim is None else selected.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """sum(values * mask) / (sum(mask) + 1e-8); an empty mask gives 0."""
    count = mask.to(values.dtype).sum() if dim is None else mask.to(values.dtype).sum(dim)
    return masked_sum(values, mask, dim) / (count + 1e-8)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Unbiased variance over the mask; fewer than two tokens give 0."""
    centered = values - masked_mean(values, mask)
    count = mask.to(values.dtype).sum()
    return masked_mean(centered.square(), mask) * count / (count - 1).clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(values - mean) / sqrt(var + 1e-8) over the mask, and 0 outside of it."""
    whitened = (values - masked_mean(values, mask)) * torch.rsqrt(masked_var(values, mask) + 1e-8)
    return torch.where(mask.bool(), whitened, 0.0)


def broadcast_true(mask: Tensor, rows: Tensor) -> Tensor:
    """`rows` [batch] for each token where `mask` [batch, response] is true, and 0 elsewhere; on the CPU by numpy, in a third of
    torch's time."""
    if not (is_in_memory(rows) and is_in_memory(mask)) or rows.dtype not in (torch.float32, torch.float64):
        return torch.where(mask, rows[:, None], 0.0)
    return torch.from_numpy(np.where(mask.numpy(), rows.numpy()[:, None], rows.new_zeros(()).numpy()))


def token_mean(values: Tensor, mask: Tensor) -> Metric:
    """Mean of `values` over the mask as a metric; micro-batches merge to the mean over all of their tokens."""
    values = values.detach()
    if not values.is_floating_point():
        values = values.to(torch.float32)
    return Metric.mean(masked_mean(values, mask), mask.sum())
