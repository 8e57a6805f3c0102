"""Training calls: which rows each optimizer step takes, and what a call came to on one rank or on all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from verl.algorithms.correction import rollout_gap_metrics
from verl.data_proto.metrics import Metric, merge_metrics
from verl.data_proto.proto import DataProto
from verl.parallel.serialize import record
from verl.roles.step_guard import Finding, merge_findings


@dataclass(frozen=True)
class MiniBatchSchedule:
    """`epochs` passes over a batch in mini-batches of `size` rows (the last may be short). `skips_zero_advantages`: rows
    whose advantages are all 0 are not computed. `unit` is that of the objective (see TrainEngine.train_batch)."""

    size: int
    epochs: int
    shuffle: bool
    seed: int
    skips_zero_advantages: bool = False
    unit: str = "row"

    def rows(self, num_rows: int, step: int) -> list[np.ndarray]:
        """The rows of each optimizer step of trainer step `step`. The order of a shuffled pass depends on (seed, step,
        pass) alone. Unshuffled, the samples of a prompt stay together and share its computation."""
        found = []
        for epoch in range(self.epochs):
            rows = np.arange(num_rows)
            if self.shuffle:
                rows = np.random.Generator(np.random.Philox(key=[self.seed + step, epoch])).permutation(num_rows)
            found += [rows[start : start + self.size] for start in range(0, num_rows, self.size)]
        return found

    def computed(self, batch: DataProto) -> list[int]:
        """The rows of `batch` that are computed. At least one: the optimizer then steps on its zero gradient, with momentum
        and weight decay, as it would after computing all rows."""
        if not self.skips_zero_advantages or not len(batch):
            return list(range(len(batch)))
        mask = batch.batch["response_mask"].bool()
        needed = ((batch.batch["advantages"] != 0) & mask).any(dim=1)
        if not needed.any():
            lengths = batch.batch["attention_mask"].sum(dim=1)
            shortest = torch.where(mask.any(dim=1), lengths, lengths.max() + 1).argmin()
            return [int(shortest)]
        return needed.nonzero().flatten().tolist()


@record
@dataclass
class Updates:
    """`steps` holds the figures of each optimizer step. On a rank they are of its rows; merged over ranks they are those
    of the mini-batch, because losses are divided by the totals of all ranks.

    `observed` is empty, or (trainer log-probs, sampler log-probs) of the tokens of the first optimizer step, flat:
    they were still scored by the weights that sampled them. `findings` are guards that
    optimizer steps have set off.
    """

    role: str
    steps: list[dict[str, Metric]]
    lr: float
    observed: list[torch.Tensor] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def merge(self, others: Sequence[Updates]) -> Updates:
        """The call on all ranks, in their order."""
        parts = [self, *others]
        steps = [merge_metrics(found) for found in zip(*(part.steps for part in parts), strict=True)]
        with_tokens = [part.observed for part in parts if part.observed]
        observed = [torch.cat(tensors) for tensors in zip(*with_tokens, strict=True)]
        return Updates(self.role, steps, self.lr, observed, merge_findings([part.findings for part in parts]))

    def metrics(self) -> dict[str, Metric]:
        """`{role}/*`: the mean over the optimizer steps, whose figures are totals of a mini-batch; and how far trainer and
        sampler are apart."""
        steps = [{k: Metric.mean(m.value) for k, m in found.items()} for found in self.steps]
        metrics = {f"{self.role}/{k}": v for k, v in merge_metrics(steps).items()}
        if self.observed:
            metrics.update(rollout_gap_metrics(*self.observed))
        metrics[f"{self.role}/lr"] = Metric.last(self.lr)
        return metrics
