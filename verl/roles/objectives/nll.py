"""The loss of supervised fine-tuning: a mean over all trained tokens of the global batch."""

import torch

from verl.algorithms.sft_losses import SFT_LOSSES
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.engines.api import BatchTotals
from verl.parallel.device import to_device
from verl.roles.api import Objective
from verl.roles.guards import StepGuard
from verl.roles.objectives.terms import FirstRows, aggregate


class TokenObjective(Objective):
    """`loss` is a name of SFT_LOSSES. Its metrics are means over the trained tokens of the global batch: token_accuracy (share
    of targets with the largest logit), entropy (of the next-token distribution, nats), and nll (-log p) with another loss."""

    outputs = ("log_probs", "correct", "entropy")

    def __init__(self, loss: str, guard: StepGuard):
        self.loss, self.guard = loss, guard
        self._first = FirstRows()

    def __call__(
        self, outputs: dict[str, torch.Tensor], batch: DataProto, totals: BatchTotals
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        """See Objective; reads the column response_mask."""
        log_probs = outputs["log_probs"]
        mask = to_device(batch.batch["response_mask"], log_probs.device)
        agg = aggregate("token-mean", 1.0, totals)
        self.guard.observe(batch.batch, mask, {"log_probs": log_probs}, {})
        self._first.add(outputs, batch, batch.batch["response_mask"])
        means = {"token_accuracy": outputs["correct"], "entropy": outputs["entropy"]}
        if self.loss != "nll":
            means["nll"] = -log_probs
        metrics = {name: Metric.sum(agg(values.detach(), mask)) for name, values in means.items()}
        return SFT_LOSSES[self.loss](log_probs, mask, agg), metrics

    def pop_observed(self) -> list[torch.Tensor]:
        """See Objective and FirstRows."""
        return self._first.pop()
