"""Monitors of training stability: metrics of a batch or mini-batch that may have a limit.

    grad_norm      L2 norm of the gradient before clipping
    policy_kl      KL(old policy || policy), nats per token, k3
    reference_kl   KL(policy || reference policy), nats per token, k3
    ratio          largest probability ratio of a token between policy and old policy, or its inverse
    entropy        mean entropy of the next-token distribution, nats; the limit is the lowest
    sampler_kl     KL(sampler || policy), nats per token, k3
    mismatch       largest |p - p_sampler| of a sampled token

`nonfinite`, NaN or infinity in any input of a step, has no limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from verl.algorithms.kl import kl_penalty
from verl.algorithms.masked import masked_mean, token_mean
from verl.algorithms.policy_losses.terms import LOG_RATIO_LIMIT
from verl.data_proto.metrics import Metric
from verl.data_proto.stored_column import is_finite

if TYPE_CHECKING:
    from verl.config import StepGuardsConfig

NONFINITE = "nonfinite"
NUM_NAMED = 16  # samples named by a finding, the worst first

Over = Literal["mean", "max"]


@dataclass(frozen=True)
class Monitor:
    """A monitored metric. `of` computes token values [batch, response] from the tensors named in `inputs`; the metric is
    their mean or maximum over trained tokens. `lowest`: the limit is a lower bound."""

    meaning: str
    inputs: tuple[str, ...]
    of: Callable[..., Tensor]
    over: Over = "mean"
    lowest: bool = False


def _ratio(log_prob: Tensor, old: Tensor) -> Tensor:
    return (log_prob - old).abs().clamp(max=LOG_RATIO_LIMIT).exp()


# inputs: log_prob (of the policy), old, reference, sampler: log-probs of the sampled tokens; entropy
MONITORS: dict[str, Monitor] = {
    "policy_kl": Monitor("KL to the old policy", ("old", "log_prob"), lambda old, now: kl_penalty(old, now, "k3")),
    "reference_kl": Monitor(
        "KL to the reference policy", ("log_prob", "reference"), lambda now, ref: kl_penalty(now, ref, "k3")
    ),
    "ratio": Monitor("largest probability ratio to the old policy", ("log_prob", "old"), _ratio, over="max"),
    "entropy": Monitor("entropy", ("entropy",), lambda entropy: entropy, lowest=True),
    "sampler_kl": Monitor(
        "KL of the sampler to the policy", ("sampler", "log_prob"), lambda sampler, now: kl_penalty(sampler, now, "k3")
    ),
    "mismatch": Monitor(
        "largest difference between trainer's and sampler's probability",
        ("log_prob", "sampler"),
        lambda now, sampler: (now.exp() - sampler.exp()).abs(),
        over="max",
    ),
}
GRAD_NORM = "grad_norm"
MEANINGS = {NONFINITE: "a value that is not finite", GRAD_NORM: "gradient norm"} | {
    n: s.meaning for n, s in MONITORS.items()
}


def limits_of(config: StepGuardsConfig) -> dict[str, float]:
    """Limits by name, from the section `trainer.guards`; a program's section has the limits that it supports."""
    limits = {name: config[name].limit for name in (GRAD_NORM, *MONITORS) if name in config}
    return {name: float(limit) for name, limit in limits.items() if limit is not None}


def breaks(name: str, value: float, limit: float) -> bool:
    """Whether `value` of the monitor `name` exceeds `limit`; NaN does."""
    if math.isnan(value):
        return True
    return value < limit if name in MONITORS and MONITORS[name].lowest else value > limit


@torch.no_grad()
def monitor_tokens(names: Iterable[str], inputs: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Token values [batch, response] of the monitors among `names` with given inputs."""
    values = {}
    for name in names:
        monitor = MONITORS.get(name)
        arguments = [inputs.get(i) for i in monitor.inputs] if monitor is not None else [None]
        if monitor is not None and all(tensor is not None for tensor in arguments):
            values[name] = monitor.of(*arguments)
    return values


def monitor_metric(name: str, values: Tensor, mask: Tensor) -> Metric:
    """Metric of a micro-batch; merging gives the metric of the batch. An empty mask has no weight."""
    if MONITORS[name].over == "mean":
        return token_mean(values, mask)
    return Metric.max(torch.where(mask, values, -math.inf).amax())


def monitor_rows(name: str, values: Tensor, mask: Tensor) -> Tensor:
    """Metric of each row, [batch]; rows without a trained token get the value furthest from any limit."""
    monitor = MONITORS[name]
    best = math.inf if monitor.lowest else -math.inf
    rows = masked_mean(values, mask, -1) if monitor.over == "mean" else torch.where(mask, values, -math.inf).amax(-1)
    return torch.where(mask.any(-1), rows, best)


def worst_rows(name: str, rows: Tensor, limit: float) -> tuple[list[int], int]:
    """(indices of the rows [batch] beyond `limit`, worst first and at most NUM_NAMED; their number).

    If only the mean over all rows exceeds the limit, the result is the worst row.
    """
    if rows.numel() == 0:
        return [], 0
    badness = -rows if MONITORS[name].lowest else rows
    badness = torch.where(rows.isnan(), math.inf, badness)
    bound = -limit if MONITORS[name].lowest else limit
    count = max(1, int((badness > bound).sum()))
    return badness.argsort(descending=True, stable=True)[: min(count, NUM_NAMED)].tolist(), count


def nonfinite_rows(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Rows of `values` [batch, ...] with NaN or infinity where `mask` is true: [batch] bool."""
    if is_finite(values):
        return torch.zeros(len(values), dtype=torch.bool, device=values.device)
    bad = ~torch.isfinite(values)
    if mask is not None:
        bad = bad & mask
    return bad.reshape(len(bad), -1).any(-1)


def first_nonfinite(values: Tensor, mask: Tensor | None = None) -> float:
    """The first value that is not finite."""
    bad = ~torch.isfinite(values)
    if mask is not None:
        bad = bad & mask
    return float(values[bad][0])
