"""Rejection of tokens or sequences with too different probabilities under trainer and sampler.

Bounds of k1 are bounds of the ratio rho = trainer / sampler. Existing releases document the same and apply them to 1 / rho.
"""

import math

import torch
from torch import Tensor

from verl.algorithms.correction.diagnostics import extremes
from verl.algorithms.masked import masked_mean, masked_sum, token_mean
from verl.config.rejection import Rejection, parse_rejection
from verl.data_proto.metrics import Metric

EXPONENT_LIMIT = 80.0  # of k3: its largest value fits in float32


def divergence(log_ratio: Tensor, estimator: str) -> Tensor:
    """Divergence k1 = -log rho, k2 = (log rho)^2 / 2 or k3 = rho - 1 - log rho.

    In float64: k3 of a ratio near 1 is a small difference of large numbers.
    """
    log_ratio = log_ratio.double()
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    return log_ratio.clamp(max=EXPONENT_LIMIT).expm1() - log_ratio


def rejection_mask(
    log_ratio: Tensor, mask: Tensor, options: str, thresholds: float | str | None
) -> tuple[Tensor, dict[str, Metric]]:
    """(mask of the kept tokens, bool [batch, response]; metrics). A token must pass all options.

    token_*: each token by its divergence. seq_sum_*, seq_mean_*: the row by the sum or mean over its tokens. seq_max_*: the row
    by all its tokens, each within the bounds.

    Metrics: rollout_rs_<option>_{mean,max,min,masked_fraction,seq_masked_fraction} of the divergence that is compared, and
    rollout_rs_{masked_fraction,seq_masked_fraction} of all together (a row counts when it loses a token).
    """
    mask = mask.bool()
    accepted = mask
    metrics: dict[str, Metric] = {}
    for rule in parse_rejection(options, thresholds):
        divergences = divergence(log_ratio, rule.estimator)
        compared = _compared(divergences, mask, rule.scope)
        if rule.scope == "seq_max":
            passes = mask & (_is_within(divergences, rule) | ~mask).all(-1, keepdim=True)
        else:
            passes = mask & _is_within(compared, rule)
        accepted = accepted & passes
        over = mask if rule.scope == "token" else mask.any(-1, keepdim=True)
        name = f"rollout_rs_{rule.option}"
        metrics.update({f"{name}_mean": token_mean(compared, over), **extremes(name, compared[over])})
        metrics.update(_fractions(name, mask, passes))
    metrics.update(_fractions("rollout_rs", mask, accepted))
    return accepted, metrics


def _is_within(values: Tensor, rule: Rejection) -> Tensor:
    return (values >= rule.low) & (values <= rule.high)


def _compared(values: Tensor, mask: Tensor, scope: str) -> Tensor:
    if scope == "token":
        return values
    if scope == "seq_sum":
        return masked_sum(values, mask, -1)[:, None]
    if scope == "seq_mean":
        return masked_mean(values, mask, -1)[:, None]
    return torch.where(mask, values, -math.inf).amax(-1, keepdim=True)


def _fractions(name: str, mask: Tensor, passes: Tensor) -> dict[str, Metric]:
    rejected = mask & ~passes
    return {
        f"{name}_masked_fraction": token_mean(rejected, mask),
        f"{name}_seq_masked_fraction": token_mean(rejected.any(-1), mask.any(-1)),
    }
