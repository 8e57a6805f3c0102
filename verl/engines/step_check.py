"""Metrics of a mini-batch before its optimizer step is taken, and gradients that wait for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field

import torch
import torch.distributed as dist

from verl.data_proto.metrics import Metric
from verl.engines.api import BatchTotals
from verl.models.randomness import RandomState


def whole_batch_metrics(
    metrics: Mapping[str, Metric], names: Mapping[str, str], over_ranks: Callable[..., torch.Tensor]
) -> dict[str, float]:
    """The metrics `names` of a mini-batch from the metrics of this rank's share; equal on all ranks. Metrics that no rank has
    are left out. `names` gives the reduction of each: sum, mean or max. `over_ranks(numbers, op)` reduces."""
    sums = torch.zeros(len(names), 3, dtype=torch.float64)  # total, weight, ranks that have it
    peaks = torch.full((len(names),), -math.inf, dtype=torch.float64)
    for i, (name, kind) in enumerate(names.items()):
        if name not in metrics:
            continue
        value = metrics[name].value
        if kind == "max":
            # the largest of a NaN and a number depends on the order of ranks
            peaks[i] = math.inf if math.isnan(value) else value
            sums[i, 2] = float(peaks[i] > -math.inf)
            continue
        weight = sum(float(weight) for _, weight in metrics[name].observations) if kind == "mean" else 1.0
        if weight:
            sums[i] = torch.tensor([value * weight, weight, 1.0])
    sums, peaks = over_ranks(sums), over_ranks(peaks, dist.ReduceOp.MAX)
    merged = {}
    for (name, kind), (total, weight, count), peak in zip(names.items(), sums.tolist(), peaks.tolist(), strict=True):
        if count:
            merged[name] = {"max": peak, "mean": total / weight if weight else 0.0, "sum": total}[kind]
    return merged


@dataclass
class PendingGradients:
    """Gradients of `forward_backward` before their `optim_step`: the random state before the first call, and the sizes of each
    call."""

    random_state: RandomState
    totals: list[BatchTotals] = field(default_factory=list)

    @classmethod
    def of(cls, device: torch.device) -> PendingGradients:
        """Before the first call of an engine on `device`."""
        return cls(RandomState.of(device))

    def total(self) -> BatchTotals:
        """The sizes of all calls together."""
        return BatchTotals(*map(sum, zip(*map(astuple, self.totals), strict=True)))
