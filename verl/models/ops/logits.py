"""Statistics of the targets' softmax, and their gradient, from a chunk of logits, as ops.

Of z [tokens, vocabulary], float32 or wider, the final logits are f = softcap * tanh(logit_scale * (z + bias) / softcap) /
temperature, without the cap if softcap is 0. `targets` is int64 [tokens].
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from verl.models.ops.table import op


class ChunkStatistics(NamedTuple):
    """Each [tokens]; see verl.models.log_probs.TokenStats."""

    log_probs: torch.Tensor
    top: torch.Tensor  # greatest final logit
    log_sum: torch.Tensor  # of exp(final logits - top); not added to top, since the sum would lose its last digits
    entropy: torch.Tensor
    squared: torch.Tensor
    correct: torch.Tensor
    mean: torch.Tensor  # of the final logits at temperature 1


def _final(
    z: torch.Tensor, bias: torch.Tensor | None, temperature: float, logit_scale: float, softcap: float
) -> torch.Tensor:
    f = (z if bias is None else z + bias) * logit_scale
    return (softcap * torch.tanh(f / softcap) if softcap else f) / temperature


@op(triton="head:launch_statistics")
def target_statistics(
    z: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    logit_scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The fields of ChunkStatistics, in the dtype of z."""
    f = _final(z, bias, temperature, logit_scale, softcap)
    top = f.amax(1)
    log_sum = (f - top.unsqueeze(1)).exp().sum(1).log()
    log_p = f - top.unsqueeze(1) - log_sum.unsqueeze(1)
    p = log_p.exp()
    at_targets = log_p.gather(1, targets.unsqueeze(1)).squeeze(1)
    entropy = -torch.where(p == 0, 0.0, p * log_p).sum(1)
    correct = (at_targets >= log_p.amax(1)).to(f.dtype)
    return at_targets, top, log_sum, entropy, p.square().sum(1), correct, f.mean(1) * temperature


@op(triton="head:launch_gradient")
def target_gradient(
    z: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    statistics: torch.Tensor,
    grads: torch.Tensor,
    temperature: float,
    logit_scale: float,
    softcap: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Gradient with respect to z + bias, in `dtype`. `statistics` [4, tokens] has top, log_sum, entropy and squared, and
    `grads` [3, tokens] the gradients of log-probs, entropy and squared, zero if there is none."""
    f = _final(z, bias, temperature, logit_scale, softcap)
    top, log_sum, entropy, squared = statistics.unsqueeze(-1)
    g_target, g_entropy, g_squared = grads.unsqueeze(-1)
    log_p = f - top - log_sum
    p = log_p.exp()
    slope = 2 * g_squared * (p - squared) - g_target - g_entropy * (log_p + entropy)
    d_f = torch.where(p == 0, 0.0, p * slope).scatter_add_(1, targets.unsqueeze(1), g_target)
    if softcap:
        d_f *= 1 - (f * (temperature / softcap)).square()
    return (d_f * (logit_scale / temperature)).to(dtype)
