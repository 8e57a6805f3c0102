"""Values of single tokens that an update computes anyway, on their way from the ranks into the rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from verl.data_proto.batch_metrics import any_true

if TYPE_CHECKING:
    from verl.data_proto.proto import DataProto

_SAMPLES = 1 << 20  # above the index of a sample within its prompt


def token_keys(batch: DataProto, mask: torch.Tensor) -> list[torch.Tensor]:
    """Row keys [rows] int64 and masks [rows, response] of the rows that have tokens in `mask` [batch, response]; [] for a batch
    that does not number its rows."""
    columns = batch.batch
    if not {"ordinal", "sample_index"} <= set(columns.keys()):
        return []
    mask = mask.cpu()
    rows = any_true(mask)
    return [_row_keys(batch)[rows], mask[rows]]


def _row_keys(batch: DataProto) -> torch.Tensor:
    columns = batch.batch
    return columns["ordinal"].cpu().long() * _SAMPLES + columns["sample_index"].cpu().long()


def add_token_columns(batch: DataProto, keys: Sequence[torch.Tensor], values: dict[str, torch.Tensor]) -> None:
    """Add the float32 columns `values` [batch, response] from flat tensors in the order of the masks in `keys` (see
    `token_keys`); NaN where there is none. A key that several rows have goes to the first of them. A column that is there
    already stays."""
    if not keys:
        return
    row_keys, (own_keys, mask) = _row_keys(batch).numpy(), (key.numpy() for key in keys)
    order = np.argsort(row_keys, kind="stable")
    rows = order[np.searchsorted(row_keys[order], own_keys).clip(max=len(order) - 1)]
    known = row_keys[rows] == own_keys
    in_order = known.all() and np.array_equal(rows, np.arange(len(batch)))
    for name, flat in values.items():
        if name not in batch.batch.keys():
            column = of_keys = np.full(mask.shape, np.nan, np.float32)
            of_keys[mask] = flat.float().numpy()
            if not in_order:
                column = np.full((len(batch), mask.shape[1]), np.nan, np.float32)
                column[rows[known]] = of_keys[known]
            batch.batch[name] = torch.from_numpy(column)


def compared_log_probs(observed: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """(log-probs, the sampler's log-probs) of the tensors kept by a policy's objective; () for another objective, which keeps
    its keys first."""
    return observed[:2] if observed and observed[0].is_floating_point() else ()


def add_observed(batch: DataProto, observed: Sequence[torch.Tensor]) -> DataProto:
    """Add train_log_probs and entropys from the tensors kept by a policy's objective: (log-probs, the sampler's log-probs, row
    keys, positions, entropy), of which the last three may be missing. Returns `batch`."""
    if compared_log_probs(observed) and len(observed) >= 4:
        names = {"train_log_probs": observed[0], **dict(zip(["entropys"], observed[4:], strict=False))}
        add_token_columns(batch, observed[2:4], names)
    return batch
