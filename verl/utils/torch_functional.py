"""Door: tensor functions that recipes import; the masked ones and the entropy live in verl.algorithms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.algorithms import masked
from verl.algorithms.entropy import entropy_from_logits
from verl.algorithms.kl import AdaptiveKLController, FixedKLController
from verl.compat.schedules import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup

__all__ = [
    "AdaptiveKLController",
    "FixedKLController",
    "clip_by_value",
    "entropy_from_logits",
    "get_constant_schedule_with_warmup",
    "get_cosine_schedule_with_warmup",
    "get_response_mask",
    "logprobs_from_logits",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "pad_2d_list_to_length",
    "pad_sequence_to_length",
]


def masked_sum(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Sum where `mask` is true, over `axis` or everything."""
    return masked.masked_sum(values, mask, axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Mean where `mask` is true, over `axis` or everything; an empty mask gives 0."""
    return masked.masked_mean(values, mask, axis)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance where `mask` is true; fewer than two tokens give 0."""
    if unbiased:
        return masked.masked_var(values, mask)
    return masked.masked_mean((values - masked.masked_mean(values, mask)).square(), mask)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Values scaled to variance 1 over the mask and, with `shift_mean`, to mean 0; 0 outside of the mask."""
    whitened = masked.masked_whiten(values, mask)
    if shift_mean:
        return whitened
    return torch.where(mask.bool(), whitened + masked.masked_mean(values, mask), 0.0)


def logprobs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """log softmax(logits)[labels]: [..., vocabulary] and [...] -> [...]. Training computes it without full logits, see
    verl.models.log_probs."""
    return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, -1)


def clip_by_value(x: Tensor, tensor_min: Tensor, tensor_max: Tensor) -> Tensor:
    """`x` between two tensors of its shape."""
    return torch.clamp(x, tensor_min, tensor_max)


def get_response_mask(
    response_id: Tensor, eos_token: int | Sequence[int] = 2, dtype: torch.dtype = torch.int64
) -> Tensor:
    """1 up to and including the first end-of-sequence token of each row, 0 after it: [batch, response]."""
    ends = torch.tensor([eos_token] if isinstance(eos_token, int) else list(eos_token), device=response_id.device)
    ended = torch.isin(response_id, ends).long()
    return (ended.cumsum(dim=1) - ended == 0).to(dtype)


def pad_sequence_to_length(tensors: Tensor, max_seq_len: int, pad_token_id: int, left_pad: bool = False) -> Tensor:
    """[batch, sequence] -> [batch, at least max_seq_len]; a longer batch stays as it is."""
    missing = max(0, max_seq_len - tensors.shape[-1])
    return F.pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)


def pad_2d_list_to_length(response: list[list[int]], pad_token_id: int, max_length: int | None = None) -> Tensor:
    """Rows of token ids as one tensor, padded on the right to the longest of them or to `max_length` if that is more."""
    width = max([max_length or 0, *(len(row) for row in response)])
    return torch.tensor([row + [pad_token_id] * (width - len(row)) for row in response])
