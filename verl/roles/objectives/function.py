"""The loss of a Python function, for training loops that users write themselves (verl/session.py).

    def reinforce(outputs, rows, totals):
        return -(outputs["log_probs"] * rows["advantage"] * rows["response_mask"]).sum() / totals.num_tokens

`outputs`: tensors [rows, response] with gradient. `rows`: the columns of the rows on the same device, [rows, response] or
[rows, 1]. `totals`: BatchTotals of the call over all ranks. The function sees one micro-batch at a time; its results are added
up, so that a mean divides by `totals`. It returns the loss, or (loss, metrics) with metrics that are added up too.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.engines.api import BatchTotals
from verl.errors import ConfigError
from verl.parallel.device import to_device

LossFunction = Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor], BatchTotals], Any]


class FunctionLoss:
    """The LossFn of `function`. Raises ConfigError for a result that is no scalar tensor, or has no gradient."""

    def __init__(self, function: LossFunction):
        self.function = function

    def __call__(
        self, outputs: dict[str, torch.Tensor], batch: DataProto, totals: BatchTotals
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        device = next(iter(outputs.values())).device
        columns = {name: to_device(column, device) for name, column in batch.batch.items()}
        result = self.function(outputs, columns, totals)
        loss, metrics = result if isinstance(result, tuple) else (result, {})
        if not isinstance(loss, torch.Tensor) or loss.dim():
            shape = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            name = getattr(self.function, "__name__", "loss")
            raise ConfigError(f"The loss function {name} returned {shape}. Return a scalar tensor: sum over the rows.")
        if not loss.requires_grad and loss != 0:  # 0: rows of the micro-batch that do not train
            raise ConfigError(
                "The loss has no gradient. Compute it from `outputs` of tokens that train, without detach()."
            )
        values = {name: v.detach() if isinstance(v, torch.Tensor) else float(v) for name, v in metrics.items()}
        return loss, {name: Metric.sum(value) for name, value in values.items()}
