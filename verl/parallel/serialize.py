"""Values that cross processes, as bytes: a JSON document that refers to raw buffers. Nothing is pickled.

encode({"batch": DataProto, "step": 3}) -> (b'{...}', [buffer, ...]) -> decode -> equal value

Carried: None, bool, int, float, str, bytes, lists, tuples, dicts, numpy arrays and numbers, torch tensors, DataProto, Metric,
and dataclasses that were declared with `@record`. Rows of a column that share an object share it afterwards. Another value is
a TypeError that names its place.
"""

import dataclasses
import json
import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import torch

from verl.data_proto.media import Clip, ImageFiles, Media, MediaSpan, StoredTensors
from verl.data_proto.merge import object_array
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.data_proto.samples import Completion, PromptRequest, SamplingParams, Score
from verl.data_proto.span_column import RowSpans, SpanColumn, row_spans
from verl.data_proto.storage import bytes_of
from verl.data_proto.stored_column import LazyColumn, StoredArray, StoredColumn, is_finite, joined_rows
from verl.data_proto.trajectory import Segment, Trajectory

C = TypeVar("C", bound=type)

_RECORDS: dict[str, type] = {}
_NUMPY: dict[torch.dtype, type] = {
    torch.float32: np.float32, torch.float64: np.float64, torch.int32: np.int32, torch.int64: np.int64,
    torch.bool: np.bool_, torch.uint8: np.uint8,
}  # fmt: skip
_PLAIN_TYPES = {type(None), str, bool, int}
_STORED_BYTES = 1 << 17  # of a tensor that stays in the store; Ray itself sends a value of up to 100 KB
_LOOKED_AT = 256  # rows of a column that are looked at for shared objects, and objects that become text at a time
_PLAIN = (str, bool, int)  # float is apart: JSON has no NaN that every reader takes


def record(cls: C) -> C:
    """Class decorator: instances of this dataclass may cross processes."""
    assert dataclasses.is_dataclass(cls), f"{cls.__name__} is not a dataclass"
    _RECORDS[cls.__name__] = cls
    return cls


for _cls in (SamplingParams, PromptRequest, Completion, Score, Clip, ImageFiles, Media, MediaSpan, Segment, Trajectory):
    record(_cls)


class StoredBuffers(list[Any]):
    """The buffers of a value that a store of several processes carries, or will carry. `reference`, if there is one, names the
    object that holds them. `is_answer`: tensors are looked through once, so that the caller need not."""

    def __init__(self, buffers: Iterable[object] = (), reference: object = None, *, is_answer: bool = False):
        super().__init__(buffers)
        self.reference, self.is_answer = reference, is_answer


def encode(value: object, buffers: list[np.ndarray] | None = None) -> tuple[bytes, list[np.ndarray]]:
    """(document, buffers as 1-d uint8 arrays; the buffers of contiguous CPU tensors are views). The buffers are appended to
    `buffers`; StoredBuffers get references of the columns that are in the store, in place of their values."""
    buffers = [] if buffers is None else buffers
    document = _pack(value, buffers, "the value")
    return json.dumps(document, separators=(",", ":")).encode(), buffers


def decode(document: bytes, buffers: Sequence[np.ndarray]) -> Any:
    """Inverse of `encode`; tensors and arrays are copies, so that they can be written to. Large tensors of StoredBuffers with a
    reference are StoredColumns."""
    return _unpack(json.loads(document), buffers)


def to_bytes(value: object) -> bytes:
    """`encode` as one buffer: sizes, document, buffers."""
    document, buffers = encode(value)
    sizes = [len(document), *(len(b) for b in buffers)]
    head = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return b"".join([head, document, *(b.data for b in buffers)])


def from_bytes(data: bytes | bytearray | memoryview) -> Any:
    """Inverse of `to_bytes`."""
    view = memoryview(data)
    (count,) = struct.unpack_from("<I", view)
    sizes = struct.unpack_from(f"<{count}Q", view, 4)
    start, parts = 4 + 8 * count, []
    for size in sizes:
        parts.append(view[start : start + size])
        start += size
    return decode(bytes(parts[0]), [np.frombuffer(p, dtype=np.uint8) for p in parts[1:]])


def _pack(value: object, buffers: list[np.ndarray], place: str) -> Any:
    if value is None or isinstance(value, _PLAIN):
        return value if not isinstance(value, np.generic) else value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else {"!": "float", "v": repr(float(value))}
    if isinstance(value, list):
        if _PLAIN_TYPES.issuperset(map(type, value)):  # token ids: no call for each
            return value
        return [_pack(v, buffers, f"{place}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, np.generic):
        return _pack(value.item(), buffers, place)
    packer = next((make for kind, make in _PACKERS if isinstance(value, kind)), None)
    if packer is not None:
        return packer(value, buffers, place)
    if type(value).__name__ in _RECORDS and isinstance(value, _RECORDS[type(value).__name__]):
        names = [f.name for f in dataclasses.fields(_RECORDS[type(value).__name__])]
        fields = {name: getattr(value, name) for name in names}
        return {"!": "record", "t": type(value).__name__, "v": _pack_items(fields, buffers, place)}
    raise TypeError(
        f"{place} is a {type(value).__name__}, which cannot be sent to another process; give numbers, texts, lists, dicts, "
        "arrays or tensors."
    )


def _pack_items(items: dict[Any, Any], buffers: list[np.ndarray], place: str) -> list[object]:
    return [[_pack(k, buffers, f"a key of {place}"), _pack(v, buffers, f"{place}.{k}")] for k, v in items.items()]


def _pack_bytes(value: bytes | bytearray, buffers: list[np.ndarray], place: str) -> object:
    buffers.append(np.frombuffer(value, dtype=np.uint8))
    return {"!": "bytes", "b": len(buffers) - 1}


def _pack_tensor(value: torch.Tensor, buffers: list[np.ndarray], place: str) -> object:
    if value.is_nested:
        raise TypeError(f"{place} is a nested tensor; pad it before it is sent to another process.")
    facts: dict[str, object] = {"t": str(value.dtype).removeprefix("torch."), "s": list(value.shape)}
    data = bytes_of(value).numpy()
    if getattr(buffers, "is_answer", False) and data.nbytes >= _STORED_BYTES and value.dtype in _NUMPY:
        array: np.ndarray = data.view(_NUMPY[value.dtype]).reshape(tuple(value.shape))
        if array.ndim == 2 and (spans := row_spans(array)) is not None:
            return _pack_column(SpanColumn(spans, array.shape[1]), buffers, place)
        facts["f"] = value.is_floating_point() and is_finite(value)
    buffers.append(data)
    return {"!": "tensor", "b": len(buffers) - 1, **facts}


def _pack_column(value: LazyColumn, buffers: list[Any], place: str) -> object:
    if not isinstance(buffers, StoredBuffers) or not value.is_stored:
        return _pack_tensor(value.copied(), buffers, place)
    if isinstance(value, SpanColumn):
        return {"!": "spans", "v": [_pack_array(part, buffers, place) for part in value.spans], "w": value.shape[1]}
    assert isinstance(value, StoredColumn)
    parts = []
    for part in value.parts:
        parts.append([len(buffers), part.number, len(part.array)])
        buffers.append(part.reference)
    rows = value.rows
    numbers = [rows.start, rows.stop] if isinstance(rows, range) else _pack_array(rows.astype(np.int32), buffers, place)
    names = {"t": str(value.dtype).removeprefix("torch."), "s": list(value.shape)}
    return {"!": "column", "p": parts, "r": numbers, **names}


def _pack_stored(value: StoredTensors, buffers: list[object], place: str) -> object:
    buffers.append(value.reference)
    return {"!": "stored", "b": len(buffers) - 1}


def _pack_array(value: np.ndarray, buffers: list[np.ndarray], place: str) -> object:
    if value.dtype == object:
        values, head = value.ravel().tolist(), {"!": "objects", "s": list(value.shape)}
        some = values[:_LOOKED_AT]
        if 2 * len(set(map(id, some))) >= len(some) and _PLAIN_TYPES.issuperset(map(type, values)):
            return {**head, "v": values}
        first: dict[int, int] = {}
        numbers = np.fromiter((first.setdefault(id(v), len(first)) for v in values), np.int32, len(values))
        rows = np.unique(numbers, return_index=True)[1].tolist()
        parts = (rows[at : at + _LOOKED_AT] for at in range(0, len(rows), _LOOKED_AT))
        objects = ([_pack(values[row], buffers, f"{place}[{row}]") for row in part] for part in parts)
        if len(rows) <= _LOOKED_AT:
            return {**head, "v": next(objects, []), "n": _pack_array(numbers, buffers, place)}
        text = b"\n".join(json.dumps(part, separators=(",", ":")).encode() for part in objects)  # a tenth of the lists
        return {**head, "v": _pack(text, buffers, place), "n": _pack_array(numbers, buffers, place)}
    if value.dtype.kind not in "biufcSU":
        raise TypeError(f"{place} is an array of {value.dtype}, which cannot be sent to another process.")
    buffers.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
    return {"!": "array", "b": len(buffers) - 1, "t": value.dtype.str, "s": list(value.shape)}


def _pack_batch(value: DataProto, buffers: list[np.ndarray], place: str) -> object:
    tensors = {} if value.batch is None else {k: value.batch.get(k) for k in value.batch.keys()}
    parts = (tensors, value.non_tensor_batch, value.meta_info)
    names = ("column", "column", "meta_info")
    packed = [_pack_items(p, buffers, f"{place}, {n}") for p, n in zip(parts, names, strict=True)]
    return {"!": "batch", "v": packed, "n": len(value), "empty": value.batch is None}


def _pack_metric(value: Metric, buffers: list[np.ndarray], place: str) -> object:
    numbers = [[float(v), float(w)] for v, w in value.observations]
    return {"!": "metric", "t": value.reduction, "v": _pack(numbers, buffers, place)}


_PACKERS: tuple[tuple[Any, Any], ...] = (
    (dict, lambda value, buffers, place: {"!": "dict", "v": _pack_items(value, buffers, place)}),
    (tuple, lambda value, buffers, place: {"!": "tuple", "v": _pack(list(value), buffers, place)}),
    ((bytes, bytearray), _pack_bytes),
    (LazyColumn, _pack_column),
    (torch.Tensor, _pack_tensor),
    (StoredTensors, _pack_stored),
    (np.ndarray, _pack_array),
    (DataProto, _pack_batch),
    (Metric, _pack_metric),
)


def _unpack(packed: object, buffers: Sequence[np.ndarray]) -> Any:
    if isinstance(packed, list):
        if _PLAIN_TYPES.issuperset(map(type, packed)):
            return packed
        return [_unpack(v, buffers) for v in packed]
    if not isinstance(packed, dict):
        return packed
    return _UNPACKERS[packed["!"]](packed, buffers)


def _items(packed: list[Any], buffers: Sequence[np.ndarray]) -> dict[Any, Any]:
    return {_unpack(k, buffers): _unpack(v, buffers) for k, v in packed}


def _unpack_tensor(packed: dict[str, Any], buffers: Sequence[np.ndarray]) -> torch.Tensor:
    dtype = getattr(torch, packed["t"])
    if 0 in packed["s"]:
        return torch.empty(packed["s"], dtype=dtype)
    buffer, reference = buffers[packed["b"]], getattr(buffers, "reference", None)
    if reference is not None and packed["s"] and buffer.nbytes >= _STORED_BYTES and dtype in _NUMPY:
        array = buffer.view(_NUMPY[dtype]).reshape(packed["s"])
        return StoredColumn((StoredArray(reference, packed["b"], array, packed.get("f", False)),))
    return torch.from_numpy(buffer.copy()).view(dtype).view(packed["s"])


def _unpack_column(packed: dict[str, Any], buffers: Sequence[Any]) -> torch.Tensor:
    """The values of a StoredColumn, in memory of this process."""
    dtype, (_, *shape), parts = getattr(torch, packed["t"]), packed["s"], []
    for place, number, length in packed["p"]:
        array = np.asarray(buffers[place].stored()[1 + number])
        parts.append(StoredArray(None, number, array.view(_NUMPY[dtype]).reshape(length, *shape)))
    rows = packed["r"]
    rows = range(*rows) if isinstance(rows, list) else _unpack(rows, buffers).astype(np.int64)
    values = joined_rows(parts, rows)
    return torch.from_numpy(values if values.base is None else values.copy())


def _unpack_spans(packed: dict[str, Any], buffers: Sequence[Any]) -> torch.Tensor:
    column = SpanColumn(RowSpans(*(_unpack_array(part, buffers) for part in packed["v"])), packed["w"])
    return column if getattr(buffers, "reference", None) is not None else column.copied()


def _unpack_array(packed: dict[str, Any], buffers: Sequence[np.ndarray]) -> np.ndarray:
    data = buffers[packed["b"]].tobytes()
    return cast("np.ndarray", np.frombuffer(data, dtype=packed["t"]).reshape(packed["s"]).copy())


def _unpack_objects(packed: dict[str, Any], buffers: Sequence[np.ndarray]) -> np.ndarray:
    objects = _unpack(packed["v"], buffers)
    if isinstance(objects, bytes):
        objects = [value for text in objects.splitlines() for value in _unpack(json.loads(text), buffers)]
    if "n" in packed:  # rows share objects again
        objects = [objects[number] for number in _unpack_array(packed["n"], buffers).tolist()]
    return cast("np.ndarray", object_array(objects).reshape(packed["s"]))


def _unpack_batch(packed: dict[str, Any], buffers: Sequence[np.ndarray]) -> DataProto:
    tensors, objects, meta = (_items(part, buffers) for part in packed["v"])
    return DataProto.from_dict(None if packed["empty"] else tensors, objects, meta)


_UNPACKERS: dict[str, Any] = {
    "float": lambda p, b: float(p["v"]),
    "dict": lambda p, b: _items(p["v"], b),
    "tuple": lambda p, b: tuple(_unpack(p["v"], b)),
    "bytes": lambda p, b: b[p["b"]].tobytes(),
    "tensor": _unpack_tensor,
    "column": _unpack_column,
    "spans": _unpack_spans,
    "stored": lambda p, b: b[p["b"]],
    "array": _unpack_array,
    "objects": _unpack_objects,
    "batch": _unpack_batch,
    "metric": lambda p, b: Metric(p["t"], tuple((v, w) for v, w in _unpack(p["v"], b))),
    "record": lambda p, b: _RECORDS[p["t"]](**_items(p["v"], b)),
}
