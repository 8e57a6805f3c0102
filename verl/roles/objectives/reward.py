"""Losses of reward models: pairs of completions, rated completions, and the steps of a solution."""

import torch
import torch.nn.functional as F

from verl.algorithms.reward_losses import pair_loss
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.engines.api import BatchTotals
from verl.parallel.device import to_device, to_match
from verl.roles.api import Objective
from verl.roles.guards import StepGuard
from verl.roles.objectives.terms import aggregate


class PairObjective(Objective):
    """A loss of PAIR_LOSSES, mean over the pairs of the global batch. Metrics: accuracy and margin (means over pairs), and
    {mean,min,max}_reward of all completions."""

    outputs = ("sequence_scores",)
    unit = "ordinal"  # of the pair

    def __init__(self, loss: str, center: float, guard: StepGuard):
        self.loss, self.center, self.guard = loss, center, guard

    def __call__(
        self, outputs: dict[str, torch.Tensor], batch: DataProto, totals: BatchTotals
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        """See Objective; reads the columns ordinal, chosen and margin, all [batch]."""
        scores, columns = _observed(self.guard, outputs, batch), batch.batch
        won, lost = sides(columns["ordinal"], columns["chosen"])
        chosen, rejected = (scores[to_device(rows, scores.device)] for rows in (won, lost))
        loss = pair_loss(self.loss, chosen, rejected, to_match(columns["margin"][won], scores), self.center)
        difference = (chosen - rejected).detach()
        means = {"accuracy": (difference.sign() + 1) / 2, "margin": difference}
        metrics = {name: Metric.sum(values.sum() / totals.num_units) for name, values in means.items()}
        return loss.sum() / totals.num_units, {**metrics, **_spread(scores, totals)}


class RatingObjective(Objective):
    """Squared distance of score and rating, mean over the completions of the global batch. Metrics: absolute_error and
    {mean,min,max}_reward."""

    outputs = ("sequence_scores",)

    def __init__(self, guard: StepGuard):
        self.guard = guard

    def __call__(
        self, outputs: dict[str, torch.Tensor], batch: DataProto, totals: BatchTotals
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        """See Objective; reads the column rating [batch]."""
        scores = _observed(self.guard, outputs, batch)
        error = scores - to_match(batch.batch["rating"], scores)
        absolute = Metric.sum(error.detach().abs().sum() / totals.num_sequences)
        return error.square().sum() / totals.num_sequences, {"absolute_error": absolute, **_spread(scores, totals)}


class StepObjective(Objective):
    """Cross-entropy of the label of each step of a solution, mean over the steps of the global batch (2305.20050). The score of
    a step is the log-odds that it is right. Metric: accuracy, share of the steps that are classified as labelled."""

    outputs = ("values",)

    def __init__(self, guard: StepGuard):
        self.guard = guard

    def __call__(
        self, outputs: dict[str, torch.Tensor], batch: DataProto, totals: BatchTotals
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        """See Objective; reads the column step_labels [batch, response], 1 or 0 where response_mask is true: on the token after
        each step."""
        scores, columns = outputs["values"], batch.batch
        mask, labels = to_device(columns["response_mask"], scores.device), to_match(columns["step_labels"], scores)
        self.guard.observe(columns, mask, {"values": scores}, {})
        agg = aggregate("token-mean", 1.0, totals)
        accuracy = ((scores.detach() > 0) == (labels > 0.5)).to(scores)
        loss = F.binary_cross_entropy_with_logits(scores, labels, reduction="none")
        return agg(loss, mask), {"accuracy": Metric.sum(agg(accuracy, mask))}


def sides(pairs: torch.Tensor, is_chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row indices of the chosen and of the rejected completions, [pairs] each, in the order of the numbers `pairs` [batch]."""
    order = torch.argsort(2 * pairs + (~is_chosen.bool()).long()).view(-1, 2)
    return order[:, 0], order[:, 1]


def _observed(guard: StepGuard, outputs: dict[str, torch.Tensor], batch: DataProto) -> torch.Tensor:
    """The scores [batch], after the guard has seen them."""
    scores = outputs["sequence_scores"]
    mask = torch.ones(len(scores), 1, dtype=torch.bool, device=scores.device)
    guard.observe(batch.batch, mask, {"sequence_scores": scores[:, None]}, {})
    return scores


def _spread(scores: torch.Tensor, totals: BatchTotals) -> dict[str, Metric]:
    values = scores.detach()
    metrics = {"mean_reward": Metric.sum(values.sum() / totals.num_sequences)}
    if len(values):  # a rank may have no rows
        metrics |= {"min_reward": Metric.min(values.min()), "max_reward": Metric.max(values.max())}
    return metrics
