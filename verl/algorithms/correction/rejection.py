"""Rejection of tokens or sequences with too different probabilities under trainer and sampler.

Bounds of k1 are bounds of the ratio rho = trainer / sampler. Existing releases document the same and apply them to 1 / rho.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.algorithms.correction.diagnostics import extremes
from verl.algorithms.masked import masked_mean, masked_sum, token_mean
from verl.data_proto.metrics import Metric
from verl.errors import ConfigError, nearest
from verl.families import ROLLOUT_RS

EXPONENT_LIMIT = 80.0  # of k3: its largest value fits in float32


@dataclass(frozen=True)
class Rejection:
    """Rule that keeps low <= divergence <= high. `low` is -inf for k2 and k3."""

    option: str
    low: float
    high: float

    @property
    def scope(self) -> str:
        return self.option.rpartition("_")[0]  # token, seq_sum, seq_mean or seq_max

    @property
    def estimator(self) -> str:
        return self.option.rpartition("_")[2]


def parse_rejection(options: str, thresholds: float | str | None) -> list[Rejection]:
    """Parse options and thresholds, such as ("token_k1,seq_mean_k3", "0.5_2.0,0.01"); one threshold applies to all.

    k1 takes "low_high" bounds of the ratio, or one number u for (1/u, u); k2 and k3 take an upper bound of the
    divergence. Raises ConfigError on an unknown option, a missing or malformed threshold, or a count that does not
    fit.
    """
    names = [name.strip() for name in options.split(",") if name.strip()]
    for name in names:
        if name not in ROLLOUT_RS:
            hint = nearest(name, ROLLOUT_RS) or "; there are " + ", ".join(ROLLOUT_RS)
            raise ConfigError(f"algorithm.rollout_correction.rollout_rs has no option {name!r}{hint}")
    if thresholds is None:
        raise ConfigError(
            f"algorithm.rollout_correction.rollout_rs={options} needs rollout_rs_threshold; "
            "give one number for each option ('low_high' for k1)."
        )
    bounds = [part.strip() for part in str(thresholds).split(",")]
    if len(bounds) == 1:
        bounds *= len(names)
    if len(bounds) != len(names):
        raise ConfigError(
            f"algorithm.rollout_correction.rollout_rs_threshold={thresholds} has {len(bounds)} entries for {len(names)} "
            "options; give one for each, or one for all."
        )
    return [_rejection(name, text) for name, text in zip(names, bounds, strict=True)]


def _rejection(option: str, text: str) -> Rejection:
    try:
        bounds = [float(part) for part in text.split("_")]
    except ValueError:
        bounds = []
    if option.endswith("k1"):
        if len(bounds) == 1 and bounds[0] > 0:
            bounds = sorted((bounds[0], 1 / bounds[0]))
        if len(bounds) == 2 and 0 < bounds[0] <= bounds[1]:
            return Rejection(option, -math.log(bounds[1]), -math.log(bounds[0]))  # of k1 = -log rho
        raise ConfigError(
            f"rollout_rs_threshold {text!r} for {option} must be 'low_high' with 0 < low <= high, or one number."
        )
    if len(bounds) == 1 and bounds[0] > 0:
        return Rejection(option, -math.inf, bounds[0])
    raise ConfigError(f"rollout_rs_threshold {text!r} for {option} must be one positive number, an upper bound.")


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

    token_*: each token by its divergence. seq_sum_*, seq_mean_*, seq_max_*: the row by the sum, mean or maximum over its
    tokens. Metrics: rollout_rs_<option>_{mean,max,min,masked_fraction,seq_masked_fraction} of the divergence that is compared,
    and rollout_rs_{masked_fraction,seq_masked_fraction} of all together (a row counts when it loses a token).
    """
    mask = mask.bool()
    accepted = mask
    metrics: dict[str, Metric] = {}
    for rule in parse_rejection(options, thresholds):
        compared = _compared(divergence(log_ratio, rule.estimator), mask, rule.scope)
        passes = mask & (compared >= rule.low) & (compared <= rule.high)
        accepted = accepted & passes
        over = mask if rule.scope == "token" else mask.any(-1, keepdim=True)
        name = f"rollout_rs_{rule.option}"
        metrics.update({f"{name}_mean": token_mean(compared, over), **extremes(name, compared[over])})
        metrics.update(_fractions(name, mask, passes))
    metrics.update(_fractions("rollout_rs", mask, accepted))
    return accepted, metrics


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
