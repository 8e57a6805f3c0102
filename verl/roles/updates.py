"""Rows of each optimizer step of a training call, the result of the call, and its share of the device's peak."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from verl.data_proto.metrics import Metric, merge_metrics
from verl.data_proto.proto import DataProto
from verl.errors import ConfigError
from verl.models.hf_module import HFModule
from verl.models.shapes import ModelShape
from verl.parallel.balance import TokenCost, unit_ids
from verl.parallel.device import peak_flops
from verl.parallel.serialize import record
from verl.roles.guards import Finding, merge_findings

BRANCH_OF = "branch_of"  # a column, see verl.data_proto.columns


@dataclass(frozen=True)
class MiniBatchSchedule:
    """`epochs` passes over a batch in mini-batches of `size` rows (the last may be short; None: all rows). `needed` chooses the
    rows of a mini-batch that are computed; None: all of them. `unit` is the objective's, see TrainEngine.train_batch. No unit
    is cut, and a unit of more than `size` rows is a mini-batch by itself.

    >>> MiniBatchSchedule(size=64, epochs=2, shuffle=True, seed=42).unit
    'row'
    """

    size: int | None = None
    epochs: int = 1
    shuffle: bool = False
    seed: int = 0
    needed: Callable[[DataProto], list[int]] | None = None
    unit: str = "row"

    def rows(self, batch: DataProto, step: int) -> list[np.ndarray]:
        """The rows of each optimizer step of trainer step `step`; the rows of a unit are adjacent. The order of a shuffled pass
        depends only on (seed, step, pass). Unshuffled, the samples of a prompt stay together and share its computation."""
        units: dict[int, list[int]] = {}
        for row, unit in enumerate(unit_ids(batch, self.unit) if self.unit != "row" else ()):
            units.setdefault(unit, []).append(row)
        num_rows = int((batch.batch[BRANCH_OF] < 0).sum()) if BRANCH_OF in batch.batch.keys() else len(batch)
        members, size = list(units.values()), self.size or max(1, num_rows)
        mini_batches, num_units = [], num_rows if self.unit == "row" else len(members)
        for epoch in range(self.epochs):
            order: np.ndarray = np.arange(num_units, dtype=np.int32)
            if self.shuffle:
                order = np.random.Generator(np.random.Philox(key=[self.seed + step, epoch])).permutation(num_units)
            if self.unit == "row":
                minis = [order[at : at + size] for at in range(0, num_units, size)]
                mini_batches += minis if num_rows == len(batch) else [with_branches(batch, mini) for mini in minis]
            else:
                mini_batches += _filled([members[number] for number in order], size)
        return mini_batches

    def computed(self, batch: DataProto) -> Sequence[int]:
        """The rows of `batch` that are computed."""
        return range(len(batch)) if self.needed is None else self.needed(batch)


def with_branches(batch: DataProto, rows: np.ndarray) -> np.ndarray:
    """Rows of episodes, then the rows of their further conversations."""
    owners = batch.batch[BRANCH_OF].numpy()
    return np.concatenate([rows, np.flatnonzero(np.isin(owners, rows))])


def _filled(units: Sequence[list[int]], size: int) -> list[np.ndarray]:
    """Units in their order, as many in each mini-batch as fit `size` rows; a larger unit is a mini-batch by itself."""
    mini_batches: list[list[int]] = []
    for rows in units:
        if not mini_batches or len(mini_batches[-1]) + len(rows) > size:
            mini_batches.append([])
        mini_batches[-1] += rows
    return [np.array(rows) for rows in mini_batches]


@record
@dataclass
class Updates:
    """The result of a role's `update`. `steps` holds the metrics of each optimizer step. A rank's metrics cover its
    rows. Merged over ranks they cover the mini-batch, because losses are divided by the totals of all ranks.

    `observed` are the tensors of Objective.pop_observed. `findings` are guards that optimizer steps have set off. `device` has
    metrics of the process that do not belong to a role's step: perf/*.
    """

    role: str
    steps: list[dict[str, Metric]]
    lr: float
    observed: list[torch.Tensor] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    device: dict[str, Metric] = field(default_factory=dict)

    def merge(self, more: Sequence[Updates]) -> Updates:
        """The call on all ranks, in their order."""
        if not more:
            return self
        parts = [self, *more]
        steps = [merge_metrics(step_parts) for step_parts in zip(*(part.steps for part in parts), strict=True)]
        with_tokens = [part.observed for part in parts if part.observed]
        observed = [torch.cat(tensors) for tensors in zip(*with_tokens, strict=True)]
        findings, device = merge_findings([part.findings for part in parts]), merge_metrics([p.device for p in parts])
        return Updates(self.role, steps, self.lr, observed, findings, device)

    def metrics(self) -> dict[str, Metric]:
        """`{role}/*` over the optimizer steps. Metrics of a step are totals of a mini-batch: counts (num_*) add up, largest and
        smallest values stay so, and all further metrics are means over the steps that have them; and the metrics of
        `device`."""
        steps = [{k: m.of_step(k.startswith("num_")) for k, m in s.items() if not m.is_empty} for s in self.steps]
        metrics = {f"{self.role}/{k}": v for k, v in merge_metrics(steps).items()}
        metrics[f"{self.role}/lr"] = Metric.last(self.lr)
        return metrics | self.device


_PASSES = 3  # forward, and a backward of twice its operations; activations that are computed again do not count


class Utilization:
    """Operations of the computed rows over the peak of the `num_devices` devices that compute a row together.

    Each row counts with its prompt, as in other releases: a prompt that several rows share is computed once, and counted
    for each of them.
    """

    def __init__(self, cost: TokenCost, peak: float, num_devices: int = 1):
        self._cost, self._peak = cost, peak * num_devices
        self._num_operations = 0.0

    @classmethod
    def of(cls, module: HFModule, device: torch.device, num_devices: int) -> Utilization | None:
        """For `module` on `device`; None for a device with an unknown peak, and a model without the sizes of a decoder."""
        peak = peak_flops(device)
        if peak is None:
            return None
        try:
            return cls(TokenCost(*ModelShape.from_config(module.config.get_text_config()).flops), peak, num_devices)
        except ConfigError:
            return None

    def add(self, batch: DataProto, rows: Sequence[int]) -> None:
        """Count `rows` of a mini-batch."""
        lengths = batch.batch["attention_mask"].sum(dim=1).tolist()
        self._num_operations += _PASSES * sum(self._cost(int(lengths[row])) for row in rows)

    def take(self, role: str, seconds: float) -> dict[str, Metric]:
        """The metric of the rows since the last call, computed in `seconds`; merged over ranks, their mean."""
        operations, self._num_operations = self._num_operations, 0.0
        return {f"perf/mfu/{role}": Metric.mean(operations / (self._peak * seconds), seconds)}
