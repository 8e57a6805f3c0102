"""Values of single tokens that an update computes anyway, on their way from the ranks into the rows of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from verl.data_proto.batch_metrics import any_true, count_true

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
    return cast("torch.Tensor", columns["ordinal"].cpu().long() * _SAMPLES + columns["sample_index"].cpu().long())


def token_places(batch: DataProto, keys: Sequence[torch.Tensor]) -> np.ndarray:
    """[2, batch] the place of each row in `keys` (-1: none), and the end of its tokens in flat tensors.

    A key of several rows belongs to the first one.
    """
    places = np.full((2, len(batch)), -1)
    if keys:
        row_keys, own_keys = _row_keys(batch).numpy(), keys[0].numpy()
        order = np.argsort(row_keys, kind="stable")
        rows = order[np.searchsorted(row_keys[order], own_keys).clip(max=len(order) - 1)]
        (matches,) = np.nonzero(row_keys[rows] == own_keys)
        places[:, rows[matches]] = matches, np.cumsum(count_true(keys[1]).numpy())[matches]
    return places


def add_token_columns(
    batch: DataProto, keys: Sequence[torch.Tensor], values: Mapping[str, torch.Tensor], places: np.ndarray | None = None
) -> None:
    """Add the float32 columns `values` [batch, response] from flat tensors in the order of the masks in `keys` (see
    `token_keys`); NaN if there is none. A column that is there already stays. `places`: of the rows of `batch`, cut from
    `token_places` of a batch that contains them; the default makes them."""
    if not keys:
        return
    numbers, ends = token_places(batch, keys) if places is None else places
    (rows,) = np.nonzero(numbers >= 0)
    masks = keys[1][torch.from_numpy(numbers[rows])].numpy()
    # runs of rows with their tokens back to back in the flat tensors
    cuts = [0, *(np.flatnonzero(np.diff(numbers[rows]) != 1) + 1).tolist(), len(rows)]
    for name, flat in values.items():
        if name not in batch.batch.keys():
            column = np.full((len(batch), keys[1].shape[1]), np.nan, np.float32)
            keyed = np.full(masks.shape, np.nan, np.float32)
            for first, stop in pairwise(cuts if len(rows) else ()):
                begin = ends[rows[first]] - np.count_nonzero(masks[first])
                keyed[first:stop][masks[first:stop]] = flat[begin : ends[rows[stop - 1]]].float().numpy()
            column[rows] = keyed
            batch.batch[name] = torch.from_numpy(column)


def compared_log_probs(observed: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """(log-probs, the sampler's log-probs) of the tensors kept by a policy's objective; () for another objective, which keeps
    its keys first."""
    return observed[:2] if observed and observed[0].is_floating_point() else ()


def add_observed(batch: DataProto, observed: Sequence[torch.Tensor], places: np.ndarray | None = None) -> DataProto:
    """Add train_log_probs and entropys from the tensors kept by a policy's objective: (log-probs, the sampler's log-probs, row
    keys, positions, entropy); the last three may be missing. `places` as in `add_token_columns`. Returns `batch`."""
    if compared_log_probs(observed) and len(observed) >= 4:
        names = {"train_log_probs": observed[0], **dict(zip(["entropys"], observed[4:], strict=False))}
        add_token_columns(batch, observed[2:4], names, places)
    return batch
