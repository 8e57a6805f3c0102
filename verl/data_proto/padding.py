"""Rows added so that a batch divides, a second batch axis folded in, and rows collated to a batch."""

from collections.abc import Sequence

import numpy as np
import torch

from verl.data_proto.merge import object_array
from verl.data_proto.proto import DataProto, DataProtoItem


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """(batch with a length that `size_divisor` divides, number of rows added); the added rows repeat the first ones.

    Raises ValueError for an empty batch: it has no row to repeat.
    """
    pad_size = -len(data) % size_divisor
    if len(data) == 0:
        raise ValueError("An empty batch cannot be padded: it has no row to repeat.")
    if pad_size == 0:
        return data, 0
    return data.select_idxs(np.arange(len(data) + pad_size) % len(data)), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Inverse of `pad_dataproto_to_divisor`."""
    return data.slice(0, len(data) - pad_size) if pad_size else data


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """[batch, ...] -> [new_batch_size, batch / new_batch_size, ...] in every column."""
    if len(data) % new_batch_size:
        raise ValueError(f"{len(data)} rows do not fold into {new_batch_size} rows of equal size.")
    batch = data.batch
    if batch is not None:
        batch = batch.view(new_batch_size, -1)
        batch.auto_batch_size_(batch_dims=1)
    objects = {k: v.reshape(new_batch_size, -1, *v.shape[1:]) for k, v in data.non_tensor_batch.items()}
    return DataProto(batch, objects, dict(data.meta_info))


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Inverse of `fold_batch_dim`: the first `batch_dims` axes of every column become one."""
    batch = data.batch
    if batch is not None:
        batch = batch.clone(recurse=False)
        batch.auto_batch_size_(batch_dims=batch_dims)
        batch = batch.view(-1)
    objects = {k: v.reshape(-1, *v.shape[batch_dims:]) for k, v in data.non_tensor_batch.items()}
    return DataProto(batch, objects, dict(data.meta_info))


def collate_fn(items: Sequence[DataProtoItem]) -> DataProto:
    """The batch with the rows `items`."""
    tensors = [item.batch for item in items]
    batch: object = None if tensors[0] is None else torch.stack(tensors).contiguous()
    names = items[0].non_tensor_batch.keys()
    objects = {name: object_array(item.non_tensor_batch[name] for item in items) for name in names}
    return DataProto(batch, objects, dict(items[0].meta_info))
