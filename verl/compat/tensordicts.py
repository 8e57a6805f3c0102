"""Batches as a TensorDict of tensors, jagged tensors (rows of different lengths) and objects:
`verl.utils.tensordict_utils`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from tensordict import NonTensorData, NonTensorStack, TensorDict

from verl.data_proto.merge import same_value
from verl.errors import BatchError


def get_tensordict(
    tensor_dict: Mapping[str, torch.Tensor | list[object]], non_tensor_dict: Mapping[str, object] | None = None
) -> TensorDict:
    """A batch from columns by name: tensors, and lists with one object per row. `non_tensor_dict` has values of the full
    batch. Raises ValueError when the columns have different numbers of rows."""
    sizes = {name: len(column) for name, column in tensor_dict.items()}
    if len(set(sizes.values())) > 1:
        raise BatchError(f"The columns do not have the same batch size: {sizes}.")
    size = next(iter(sizes.values()), 0)
    columns = {n: c if isinstance(c, torch.Tensor) else _stack(c) for n, c in tensor_dict.items()}
    batch = TensorDict(columns, batch_size=[size])
    assign_non_tensor(batch, **(non_tensor_dict or {}))
    return batch


def assign_non_tensor_data(tensor_dict: TensorDict, key: str, val: object) -> None:
    """Store one value for the full batch, in place."""
    held: Any = NonTensorData(val, batch_size=tensor_dict.batch_size)
    tensor_dict.set(key, held)


def assign_non_tensor_stack(tensor_dict: TensorDict, key: str, val: list[object]) -> None:
    """Store one object per row, in place. Raises ValueError when their number differs from the number of rows."""
    if len(val) != len(tensor_dict):
        raise BatchError(f"{key!r} has {len(val)} objects for {len(tensor_dict)} rows.")
    tensor_dict.set(key, _stack(val))


def assign_non_tensor(tensor_dict: TensorDict, **values: Any) -> TensorDict:
    """Store values in place and return the batch: a list or stack as one object per row, any other value for all rows."""
    for key, value in values.items():
        if isinstance(value, NonTensorStack):
            value = value.tolist()
        is_list = isinstance(value, list)
        (assign_non_tensor_stack if is_list else assign_non_tensor_data)(
            tensor_dict, key, unwrap_non_tensor_data(value)
        )
    return tensor_dict


def unwrap_non_tensor_data(data: object) -> Any:
    """The value inside a NonTensorData; any other value unchanged."""
    return data.data if isinstance(data, NonTensorData) else data


def get(tensor_dict: TensorDict, key: str, default: object = None) -> Any:
    """A column: the tensor, the list of its objects, or the value of the full batch; `default` if absent."""
    if key not in tensor_dict.keys():
        return default
    column = tensor_dict.get(key)
    return column.tolist() if isinstance(column, NonTensorStack) else unwrap_non_tensor_data(column)


get_non_tensor_data = get


def pop(tensor_dict: TensorDict, key: str, default: object = None) -> Any:
    """`get`, and remove the column."""
    column = get(tensor_dict, key, default)
    if key in tensor_dict.keys():
        tensor_dict.pop(key)
    return column


def get_keys(tensor_dict: TensorDict, keys: Iterable[str]) -> TensorDict:
    """The named columns. Raises KeyError for an absent one."""
    return tensor_dict.select(*keys)


def index_select_tensor_dict(batch: TensorDict, indices: torch.Tensor | Sequence[int]) -> TensorDict:
    """The rows of `indices`, in that order, of all kinds of columns."""
    rows = torch.as_tensor(indices).flatten().tolist()
    columns: dict[str, object] = {}
    for key in map(str, batch.keys()):
        column: Any = batch.get(key)
        if isinstance(column, torch.Tensor):
            columns[key] = _selected(column, rows) if column.is_nested else column[rows]
        elif isinstance(column, NonTensorStack):
            objects = column.tolist()
            columns[key] = _stack([objects[row] for row in rows])
        else:
            columns[key] = NonTensorData(column.data, batch_size=[len(rows)])
    return TensorDict(columns, batch_size=[len(rows)])


def chunk_tensordict(td: TensorDict, chunks: int) -> list[TensorDict]:
    """`chunks` parts of equal length, in order. Raises ValueError when the rows do not divide."""
    if len(td) % chunks:
        raise BatchError(f"{len(td)} rows do not divide into {chunks} equal chunks.")
    size = len(td) // chunks
    return [index_select_tensor_dict(td, range(i * size, (i + 1) * size)) for i in range(chunks)]


def concat_tensordict(data: Sequence[TensorDict]) -> TensorDict:
    """The rows of all parts in order. Raises ValueError when the parts have different columns, or different values of a
    full batch."""
    if not data:
        raise BatchError("There is nothing to concatenate.")
    names = [str(key) for key in data[0].keys()]
    for number, part in enumerate(data):
        if set(part.keys()) != set(names):
            raise BatchError(f"Part {number} and part 0 differ in {sorted(set(part.keys()) ^ set(names))}.")
    size = sum(len(part) for part in data)
    return TensorDict({n: _concat(n, [part.get(n) for part in data], size) for n in names}, batch_size=[size])


def _concat(name: str, parts: list[Any], size: int) -> object:
    if isinstance(parts[0], torch.Tensor):
        return concat_nested_tensors(parts) if parts[0].is_nested else torch.cat(parts)
    if isinstance(parts[0], NonTensorStack):
        return _stack([value for part in parts for value in part.tolist()])
    if not all(same_value(part.data, parts[0].data) for part in parts):
        raise BatchError(f"The parts have different values of {name!r}, which is one value per batch.")
    return NonTensorData(parts[0].data, batch_size=[size])


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Add the columns of `tensor_dict2` to `tensor_dict1`, in place, and return it. Raises ValueError for different numbers
    of rows, and for a column with two values."""
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        raise BatchError(f"Batches of {len(tensor_dict1)} and {len(tensor_dict2)} rows cannot be united.")
    for key in map(str, tensor_dict2.keys()):
        if key in tensor_dict1.keys() and not same_value(_rows(tensor_dict1, key), _rows(tensor_dict2, key)):
            raise BatchError(f"Both batches have a column {key!r} and its values differ; rename or pop one of them.")
        tensor_dict1.set(key, tensor_dict2.get(key))
    return tensor_dict1


def make_iterator(
    tensordict: TensorDict,
    mini_batch_size: int,
    epochs: int,
    seed: int | None = None,
    dataloader_kwargs: Mapping[str, object] | None = None,
) -> Iterator[TensorDict]:
    """Mini-batches of `epochs` passes over the rows. `dataloader_kwargs["shuffle"]` (default False) shuffles each pass by
    `seed`. Raises ValueError when the rows do not divide."""
    if len(tensordict) % mini_batch_size:
        raise BatchError(f"{len(tensordict)} rows do not divide into mini-batches of {mini_batch_size}.")
    shuffle = bool((dataloader_kwargs or {}).get("shuffle", False))
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(tensordict), generator=generator) if shuffle else torch.arange(len(tensordict))
        for rows in order.split(mini_batch_size):
            yield index_select_tensor_dict(tensordict, rows)


def unpad(data: TensorDict, pad_size: int) -> TensorDict:
    """The batch without the last `pad_size` rows."""
    return index_select_tensor_dict(data, range(len(data) - pad_size)) if pad_size else data


def contiguous(data: TensorDict) -> TensorDict:
    """The batch with contiguous tensors; jagged ones are so already."""
    columns = {key: data.get(key) for key in map(str, data.keys())}
    plain = {n: c.contiguous() for n, c in columns.items() if isinstance(c, torch.Tensor) and not c.is_nested}
    return TensorDict({**columns, **plain}, batch_size=data.batch_size)


def _rows(batch: TensorDict, key: str) -> Any:
    column = get(batch, key)
    return list(column.unbind()) if isinstance(column, torch.Tensor) and column.is_nested else column


def nested_tensor_from_tensor_list(tensors: Sequence[torch.Tensor], ragged_idx: int | None = None) -> torch.Tensor:
    """A jagged tensor of rows that differ in one axis, `ragged_idx` of the result; by default the first in which they do,
    or the last one of equal rows."""
    if ragged_idx is None:
        axes = (axis for axis in range(tensors[0].dim()) if len({row.shape[axis] for row in tensors}) > 1)
        ragged_idx = next(axes, tensors[0].dim() - 1) + 1
    lengths = torch.tensor([row.shape[ragged_idx - 1] for row in tensors], device=tensors[0].device)
    offsets = F.pad(lengths.cumsum(0), (1, 0))
    return torch.nested.nested_tensor_from_jagged(
        torch.cat(list(tensors), dim=ragged_idx - 1), offsets, jagged_dim=ragged_idx
    )


def concat_nested_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of several jagged tensors, one after the other."""
    return nested_tensor_from_tensor_list([row for part in tensors for row in part.unbind()], _ragged_axis(tensors[0]))


def _selected(column: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    parts = column.unbind()
    return nested_tensor_from_tensor_list([parts[row] for row in rows], _ragged_axis(column))


def _ragged_axis(column: torch.Tensor) -> int:
    return int(column._ragged_idx)  # type: ignore[attr-defined]  # torch has no other name for it


def pad_to_divisor(data: TensorDict, size_divisor: int) -> tuple[TensorDict, int]:
    """(a batch with a number of rows that `size_divisor` divides, the number of added rows, which repeat the first ones)."""
    pad_size = -len(data) % size_divisor
    rows = [row % len(data) for row in range(len(data) + pad_size)]
    return (index_select_tensor_dict(data, rows) if pad_size else data), pad_size


def pop_keys(tensor_dict: TensorDict, keys: Iterable[str]) -> TensorDict:
    """`get_keys`, and remove the columns."""
    names = list(keys)
    columns = get_keys(tensor_dict, names)
    for name in names:
        tensor_dict.pop(name)
    return columns


def assert_tensordict_eq(tensordict1: TensorDict, tensordict2: TensorDict) -> None:
    """Raises AssertionError, naming a column, unless both batches have equal columns of equal values."""
    assert set(tensordict1.keys()) == set(tensordict2.keys()), "The batches have different columns."
    for key in map(str, tensordict1.keys()):
        assert same_value(_rows(tensordict1, key), _rows(tensordict2, key)), f"The values of {key!r} differ."


def _stack(values: Sequence[object]) -> NonTensorStack:
    return NonTensorStack(*[NonTensorData(value) for value in values])
