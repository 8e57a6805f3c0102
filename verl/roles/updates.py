"""Rows of each optimizer step of a training call, and the result of the call on one rank or on all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from verl.data_proto.metrics import Metric, merge_metrics
from verl.data_proto.proto import DataProto
from verl.parallel.serialize import record
from verl.roles.step_guard import Finding, merge_findings


@dataclass(frozen=True)
class MiniBatchSchedule:
    """`epochs` passes over a batch in mini-batches of `size` rows (the last may be short; None: all rows). `needed` chooses the
    rows of a mini-batch that are computed; None: all of them. `unit` is that of the objective, see TrainEngine.train_batch."""

    size: int | None = None
    epochs: int = 1
    shuffle: bool = False
    seed: int = 0
    needed: Callable[[DataProto], list[int]] | None = None
    unit: str = "row"

    def rows(self, num_rows: int, step: int) -> list[np.ndarray]:
        """The rows of each optimizer step of trainer step `step`. The order of a shuffled pass depends on (seed, step,
        pass) alone. Unshuffled, the samples of a prompt stay together and share its computation."""
        found, size = [], self.size or max(1, num_rows)
        for epoch in range(self.epochs):
            rows = np.arange(num_rows)
            if self.shuffle:
                rows = np.random.Generator(np.random.Philox(key=[self.seed + step, epoch])).permutation(num_rows)
            found += [rows[start : start + size] for start in range(0, num_rows, size)]
        return found

    def computed(self, batch: DataProto) -> list[int]:
        """The rows of `batch` that are computed."""
        return list(range(len(batch))) if self.needed is None else self.needed(batch)


@record
@dataclass
class Updates:
    """The result of a role's `update`. `steps` holds the metrics of each optimizer step. On a rank they are of its rows; merged
    over ranks they are those of the mini-batch, because losses are divided by the totals of all ranks.

    `observed` are the tensors of Objective.pop_observed. `findings` are guards that optimizer steps have set off.
    """

    role: str
    steps: list[dict[str, Metric]]
    lr: float
    observed: list[torch.Tensor] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def merge(self, others: Sequence[Updates]) -> Updates:
        """The call on all ranks, in their order."""
        if not others:
            return self
        parts = [self, *others]
        steps = [merge_metrics(found) for found in zip(*(part.steps for part in parts), strict=True)]
        with_tokens = [part.observed for part in parts if part.observed]
        observed = [torch.cat(tensors) for tensors in zip(*with_tokens, strict=True)]
        return Updates(self.role, steps, self.lr, observed, merge_findings([part.findings for part in parts]))

    def metrics(self) -> dict[str, Metric]:
        """`{role}/*`: the mean over the optimizer steps, whose metrics are totals of a mini-batch."""
        steps = [{k: Metric.mean(m.value) for k, m in found.items()} for found in self.steps]
        metrics = {f"{self.role}/{k}": v for k, v in merge_metrics(steps).items()}
        metrics[f"{self.role}/lr"] = Metric.last(self.lr)
        return metrics
