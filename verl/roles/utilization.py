"""The share of a device's peak that an update uses: the metrics perf/mfu/ROLE."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.errors import ConfigError
from verl.models.hf_module import HFModule
from verl.parallel.balance import TokenCost
from verl.parallel.device import peak_flops
from verl.planner.shapes import ModelShape

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
        """For `module` on `device`; None for a device whose peak is not known, and a model without the sizes of a decoder."""
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
        """The metric of the rows since the last call, which took `seconds`; merged over ranks, their mean."""
        operations, self._num_operations = self._num_operations, 0.0
        return {f"perf/mfu/{role}": Metric.mean(operations / (self._peak * seconds), seconds)}
