"""The value loss of PPO's critic."""

from __future__ import annotations

import torch

from verl.algorithms.losses import compute_value_loss
from verl.config import CriticConfig
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.engines.api import BatchTotals
from verl.parallel.device import to_device, to_match
from verl.roles.api import Objective
from verl.roles.guards import StepGuard
from verl.roles.objectives.terms import aggregate, zero_or_nan


class ValueObjective(Objective):
    """Clipped value loss (PPO, eq. 9 as implemented with a trust region of `cliprange_value`)."""

    outputs = ("values",)

    def __init__(self, config: CriticConfig, *, max_response_length: int, guard: StepGuard | None = None):
        self.config = config
        self.guard = guard
        self.scale = config.loss_scale_factor or max_response_length

    def __call__(
        self, outputs: dict[str, torch.Tensor], batch: DataProto, totals: BatchTotals
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        """See Objective; reads the columns returns, values and response_mask."""
        vpreds = outputs["values"]
        columns = batch.batch
        mask = to_device(columns["response_mask"], vpreds.device)
        loss, metrics = compute_value_loss(
            vpreds,
            returns=to_match(columns["returns"], vpreds),
            values=to_match(columns["values"], vpreds),
            response_mask=mask,
            cliprange_value=self.config.cliprange_value,
            agg=aggregate(self.config.loss_agg_mode, self.scale, totals),
        )
        if self.guard is not None:
            self.guard.observe(columns, mask, {"values": vpreds}, {})
        return loss + zero_or_nan(vpreds), {**metrics, "vf_loss": Metric.sum(loss.detach())}
