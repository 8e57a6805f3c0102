"""Columns of two batches combined: union (same rows, more columns) and concat (same columns, more rows)."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from verl.errors import BatchError


def object_array(values: Iterable[object]) -> np.ndarray:
    """A 1-d object array, one element per row, for elements of any kind.

    `np.array(values, dtype=object)` would make a matrix out of lists of equal length.
    """
    rows = list(values)
    array = np.empty(len(rows), dtype=object)
    for i, value in enumerate(rows):
        array[i] = value
    return array


def same_value(a: object, b: object) -> bool:
    """Deep equality of column values: NaN equals NaN, arrays and tensors compare by shape and content."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)) or a.shape != b.shape:
            return False
        return all(same_value(x, y) for x, y in zip(a.ravel().tolist(), b.ravel().tolist(), strict=True))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same_value(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same_value(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float) and a != a and b != b:
        return True
    return bool(a == b)


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Adds the columns of the second to the first, in place, and returns the first.

    Raises ValueError when the row counts differ, or when a column of both differs in value.
    """
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        raise BatchError(
            f"Two batches can be united only row by row, but they have batch sizes {tuple(tensor_dict1.batch_size)} "
            f"and {tuple(tensor_dict2.batch_size)}."
        )
    for key, value in tensor_dict2.items():
        if key not in tensor_dict1.keys():
            tensor_dict1[key] = value
        elif not same_value(tensor_dict1[key], value):
            raise BatchError(
                f"Both batches have a tensor column {key!r} and its values differ; rename or pop one of them."
            )
    return tensor_dict1


def union_numpy_dict(tensor_dict1: dict[str, np.ndarray], tensor_dict2: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Adds the columns of the second to the first, in place, and returns the first. NaN equals NaN.

    Raises ValueError when a column of both differs in value.
    """
    for key, value in tensor_dict2.items():
        if key in tensor_dict1 and not same_value(tensor_dict1[key], value):
            raise BatchError(
                f"Both batches have an object column {key!r} and its values differ; rename or pop one of them."
            )
        tensor_dict1[key] = value
    return tensor_dict1


def union_meta_info(first: Mapping[str, object], second: Mapping[str, object]) -> dict[str, object]:
    """The keys of both in a new dict; raises ValueError when a key of both differs in value."""
    merged = dict(first)
    for key, value in second.items():
        if key in merged and not same_value(merged[key], value):
            raise BatchError(f"Conflicting values for meta_info key {key!r}: {merged[key]!r} and {value!r}.")
        merged[key] = value
    return merged


def concat_meta_info(parts: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """meta_info of concatenated batches: `metrics` (a dict or a list of dicts in each part) become one dict of lists in
    the order of the parts, seconds of `timing` are added, every other key must be equal wherever it occurs (ValueError)."""
    merged: dict[str, object] = {}
    metrics: list[Mapping[str, object]] = []
    timing: Counter[str] = Counter()
    for part in parts:
        part_metrics = part.get("metrics")
        if part_metrics is not None:
            metrics.extend(part_metrics if isinstance(part_metrics, list) else [part_metrics])
        timing.update(part.get("timing") or {})
        merged = union_meta_info(merged, {k: v for k, v in part.items() if k not in ("metrics", "timing")})
    if any("timing" in part for part in parts):
        merged["timing"] = dict(timing)
    if metrics:
        names = dict.fromkeys(name for entries in metrics for name in entries)
        merged["metrics"] = {name: [entries[name] for entries in metrics if name in entries] for name in names}
    return merged


def concat_columns(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Object columns of the parts, one after the other; raises ValueError naming a column that a part lacks."""
    names = parts[0].keys()
    for number, part in enumerate(parts):
        if part.keys() != names:
            odd = sorted(set(part) ^ set(names))
            raise BatchError(
                f"Part {number} and part 0 cannot be concatenated: only one of them has the columns {odd}."
            )
    return {name: np.concatenate([part[name] for part in parts], axis=0) for name in names}
