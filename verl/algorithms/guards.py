"""Signs that training goes wrong, found in columns and figures: pure functions of tensors and numbers.

A sign is one figure of a batch or a mini-batch that has a limit:

    grad_norm      L2 norm of the gradient before clipping
    policy_kl      KL(old policy || policy), nats per token, k3
    reference_kl   KL(policy || reference policy), nats per token, k3
    ratio          largest probability ratio of a token between policy and old policy, or its inverse
    entropy        mean entropy of the next-token distribution, nats; the limit is the lowest
    mismatch       largest |p - p_sampler| of a sampled token

`nonfinite`, NaN or infinity in any of what goes into a step, has no limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from verl.algorithms.kl import kl_penalty
from verl.algorithms.masked import masked_mean, token_mean
from verl.algorithms.policy_losses.terms import LOG_RATIO_LIMIT
from verl.data_proto.metrics import Metric

NONFINITE = "nonfinite"
NUM_NAMED = 16  # samples that a finding names, the worst first

Over = Literal["mean", "max"]


@dataclass(frozen=True)
class Sign:
    """`of` makes token values [batch, response] from the tensors named in `inputs`; they count as a mean or a maximum over
    trained tokens. `lowest`: the limit is a bound from below."""

    meaning: str
    inputs: tuple[str, ...]
    of: Callable[..., Tensor]
    over: Over = "mean"
    lowest: bool = False


def _ratio(log_prob: Tensor, old: Tensor) -> Tensor:
    return (log_prob - old).abs().clamp(max=LOG_RATIO_LIMIT).exp()


# inputs: log_prob (of the policy), old, reference, sampler: log-probs of the sampled tokens; entropy
SIGNS: dict[str, Sign] = {
    "policy_kl": Sign("KL to the old policy", ("old", "log_prob"), lambda old, now: kl_penalty(old, now, "k3")),
    "reference_kl": Sign(
        "KL to the reference policy", ("log_prob", "reference"), lambda now, ref: kl_penalty(now, ref, "k3")
    ),
    "ratio": Sign("largest probability ratio to the old policy", ("log_prob", "old"), _ratio, over="max"),
    "entropy": Sign("entropy", ("entropy",), lambda entropy: entropy, lowest=True),
    "mismatch": Sign(
        "largest difference between trainer's and sampler's probability",
        ("log_prob", "sampler"),
        lambda now, sampler: (now.exp() - sampler.exp()).abs(),
        over="max",
    ),
}
GRAD_NORM = "grad_norm"
MEANINGS = {NONFINITE: "a value that is not finite", GRAD_NORM: "gradient norm"} | {
    n: s.meaning for n, s in SIGNS.items()
}


def limits_of(config: Any) -> dict[str, float]:
    """Guard -> limit, for those of the section `trainer.guards` that have one."""
    found = {name: config[name].limit for name in (GRAD_NORM, *SIGNS) if name in config}
    return {name: float(limit) for name, limit in found.items() if limit is not None}


def breaks(name: str, value: float, limit: float) -> bool:
    """Whether `value` of the sign `name` is beyond `limit`; a value that is not a number is."""
    if math.isnan(value):
        return True
    return value < limit if name in SIGNS and SIGNS[name].lowest else value > limit


@torch.no_grad()
def token_signs(names: Iterable[str], inputs: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Token values [batch, response] of those signs among `names` whose inputs are there."""
    found = {}
    for name in names:
        sign = SIGNS.get(name)
        given = [inputs.get(i) for i in sign.inputs] if sign is not None else [None]
        if sign is not None and all(tensor is not None for tensor in given):
            found[name] = sign.of(*given)
    return found


def sign_metric(name: str, values: Tensor, mask: Tensor) -> Metric:
    """The figure of a micro-batch; merging gives that of the batch. An empty mask counts for nothing."""
    if SIGNS[name].over == "mean":
        return token_mean(values, mask)
    return Metric.max(torch.where(mask, values, -math.inf).amax())


def sign_of_rows(name: str, values: Tensor, mask: Tensor) -> Tensor:
    """[batch] the figure of each row; rows without a trained token have the value that is furthest from any limit."""
    sign = SIGNS[name]
    best = math.inf if sign.lowest else -math.inf
    rows = masked_mean(values, mask, -1) if sign.over == "mean" else torch.where(mask, values, -math.inf).amax(-1)
    return torch.where(mask.any(-1), rows, best)


def worst_rows(name: str, rows: Tensor, limit: float) -> tuple[list[int], int]:
    """(numbers of the rows [batch] that are beyond `limit`, worst first and at most NUM_NAMED; how many there are). Where
    only the mean of all is beyond it, the worst row alone."""
    if rows.numel() == 0:
        return [], 0
    badness = -rows if SIGNS[name].lowest else rows
    badness = torch.where(rows.isnan(), math.inf, badness)
    bound = -limit if SIGNS[name].lowest else limit
    count = max(1, int((badness > bound).sum()))
    return badness.argsort(descending=True, stable=True)[: min(count, NUM_NAMED)].tolist(), count


def nonfinite_rows(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """[batch] rows of `values` [batch, ...] with NaN or infinity where `mask` is true."""
    bad = ~torch.isfinite(values)
    if mask is not None:
        bad = bad & mask
    return bad.reshape(len(bad), -1).any(-1)


def first_nonfinite(values: Tensor, mask: Tensor | None = None) -> float:
    """The first value of a row that is not finite."""
    bad = ~torch.isfinite(values)
    if mask is not None:
        bad = bad & mask
    return float(values[bad][0])
