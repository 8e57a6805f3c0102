"""Columns as bytes, without pickle: safetensors and JSON for files, raw buffers between processes."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tensordict import TensorDict

from verl.data_proto.merge import object_array
from verl.regular_files import whole_file

# The JSON part rides as a byte tensor: the header of a safetensors file is limited to 100 MB, texts are not.
_JSON_COLUMN = "__verl_json__"

TensorRecord = tuple[str, tuple[int, ...], memoryview]


def _jsonable(value: object, place: str) -> object:
    """`value` in types that come back from JSON as they went in (numpy scalars as Python numbers, tuples as lists)."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, np.generic):
        return _jsonable(value.item(), place)
    if isinstance(value, np.ndarray):
        return _jsonable(value.tolist(), place)
    if isinstance(value, (list, tuple)):
        return [_jsonable(v, f"{place}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, Mapping):
        odd = [key for key in value if not isinstance(key, str)]
        if odd:
            raise ValueError(f"{place} has the key {odd[0]!r}, which JSON cannot hold; use text keys before saving.")
        return {key: _jsonable(v, f"{place}.{key}") for key, v in value.items()}
    raise ValueError(
        f"{place} holds a {type(value).__name__}, which JSON cannot hold; convert it or drop the column before saving."
    )


def save_columns(
    path: Path, tensors: Mapping[str, torch.Tensor], objects: Mapping[str, np.ndarray], meta_info: Mapping[str, object]
) -> None:
    """Write `path` completely or not at all. Raises ValueError naming what JSON cannot hold, before anything is written."""
    nested = [name for name, tensor in tensors.items() if tensor.is_nested]
    if nested:
        raise ValueError(f"Column {nested[0]!r} is a nested tensor; pad it before saving.")
    document = {
        "objects": {
            name: {"dtype": str(a.dtype), "rows": _jsonable(a.tolist(), f"object column {name!r}")}
            for name, a in objects.items()
        },
        "meta_info": _jsonable(dict(meta_info), "meta_info"),
    }
    text = bytearray(json.dumps(document).encode())
    # clones: safetensors refuses columns that share memory, such as a mask that is a view of another
    stored = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    stored[_JSON_COLUMN] = torch.frombuffer(text, dtype=torch.uint8)
    with whole_file(path) as temporary:
        save_file(stored, temporary)


def load_columns(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray], dict[str, object]]:
    """(tensors, object columns, meta_info) of a file of `save_columns`; raises ValueError when it is none."""
    try:
        tensors = load_file(path)
        document = json.loads(tensors.pop(_JSON_COLUMN).numpy().tobytes())
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is not a batch saved by save_to_disk ({error}).") from error
    objects = {
        name: object_array(column["rows"]) if column["dtype"] == "object" else np.array(column["rows"], column["dtype"])
        for name, column in document["objects"].items()
    }
    return tensors, objects, document["meta_info"]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The values of `tensor` as uint8 [bytes]; a view of it when it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().flatten()
    # one element is contiguous at any stride, and its bytes are seen only at stride 1
    return (flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)).view(torch.uint8)


def serialize_single_tensor(tensor: torch.Tensor) -> TensorRecord:
    """(dtype name, shape, bytes) of a tensor; the bytes are a view of it when it is contiguous and on the CPU."""
    flat = bytes_of(tensor)
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), memoryview(flat.numpy())  # type: ignore[arg-type]


def deserialize_single_tensor(record: tuple[str, Any, Any]) -> torch.Tensor:
    """Inverse of `serialize_single_tensor` (a copy). Raises ValueError when the bytes do not fill the shape."""
    dtype_name, shape, data = record
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{dtype_name!r} is not a torch dtype.")
    num_bytes = math.prod(shape) * dtype.itemsize
    if memoryview(data).nbytes != num_bytes:
        raise ValueError(f"{memoryview(data).nbytes} bytes cannot be a {dtype_name} tensor of shape {tuple(shape)}.")
    if num_bytes == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(tuple(shape))


def serialize_tensordict(batch: TensorDict) -> tuple[tuple[int, ...], str | None, dict[str, object]]:
    """(batch size, device, columns): a column is a TensorRecord, or (layout, list of records) for a nested tensor."""
    columns: dict[str, object] = {}
    for name in map(str, batch.keys()):
        tensor: Any = batch.get(name)
        if tensor.is_nested:
            layout = str(tensor.layout).removeprefix("torch.")
            columns[name] = (layout, [serialize_single_tensor(part) for part in tensor.unbind()])
        else:
            columns[name] = serialize_single_tensor(tensor)
    return tuple(batch.batch_size), None if batch.device is None else str(batch.device), columns


def deserialize_tensordict(record: tuple[Any, str | None, Mapping[str, Any]]) -> TensorDict:
    """Inverse of `serialize_tensordict`."""
    batch_size, device, columns = record
    tensors = {}
    for name, column in columns.items():
        if len(column) == 2:
            layout, parts = column
            parts = [deserialize_single_tensor(part) for part in parts]
            tensors[name] = torch.nested.as_nested_tensor(parts, layout=getattr(torch, layout))
        else:
            tensors[name] = deserialize_single_tensor(column)
    return TensorDict(tensors, batch_size=tuple(batch_size), device=device)
