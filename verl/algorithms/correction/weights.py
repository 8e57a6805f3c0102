"""Importance weights of trainer over sampler."""

import torch
from torch import Tensor

from verl.algorithms.masked import masked_mean, masked_sum
from verl.errors import ConfigError

IS_LEVELS = ("token", "sequence")
LOG_RATIO_LIMIT = 20.0


def parse_is_threshold(threshold: float | str) -> tuple[float | None, float]:
    """Parse a threshold: 2.0 or "2.0" is (None, 2.0), truncation; "0.5_2.0" is (0.5, 2.0), weights outside become 0."""
    try:
        bounds = [float(part) for part in str(threshold).split("_")]
    except ValueError:
        bounds = []
    if len(bounds) == 1 and bounds[0] > 0:
        return None, bounds[0]
    if len(bounds) == 2 and 0 <= bounds[0] <= bounds[1]:
        return bounds[0], bounds[1]
    raise ConfigError(
        f"algorithm.rollout_correction.rollout_is_threshold={threshold!r} must be a positive number or 'low_high', "
        "for example 2.0 or '0.5_2.0'."
    )


def ratios(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """Ratio rho of each token (token), or the product over a row's tokens (sequence, [batch, 1]); exponents within 20."""
    if level not in IS_LEVELS:
        raise ConfigError(
            f"algorithm.rollout_correction.rollout_is={level!r} must be 'token', 'sequence' or null (no weights)."
        )
    if level == "sequence":
        log_ratio = masked_sum(log_ratio, mask, -1)[:, None]
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def importance_weights(
    log_ratio: Tensor, mask: Tensor, level: str, threshold: float | str = 2.0, *, batch_normalize: bool = False
) -> Tensor:
    """Weights [batch, response], 0 outside the mask, without gradient.

    w = rho, or the row's product of rho for level `sequence`. One threshold truncates w from above (TIS, off-policy
    RL by Yao et al. 2025); "low_high" sets w outside [low, high] to 0 (IcePop). `batch_normalize` divides by the mean
    weight: over tokens for level token, over rows that have tokens for level sequence.
    """
    low, high = parse_is_threshold(threshold)
    raw = ratios(log_ratio.detach(), mask, level)
    if low is None:
        bounded = raw.clamp(max=high)
    else:
        bounded = torch.where((raw >= low) & (raw <= high), raw, 0.0)
    if batch_normalize:
        over = mask if level == "token" else mask.bool().any(-1, keepdim=True)
        mean = masked_mean(bounded, over)
        bounded = torch.where(mean > 1e-8, bounded / mean.clamp(min=1e-8), bounded)
    return torch.where(mask.bool(), bounded, 0.0)
