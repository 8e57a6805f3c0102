"""The lines of a samples file. Columns of tokens are numpy arrays, and become text without a Python object per token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from verl.tracking.files import json_text

_ROWS = 64  # rows whose text is in memory at once
# Conversions of Python's and numpy's values by pyarrow import pandas where it is installed, and views of buffers do not.
_NULL, _COMMA = pa.StringArray.from_buffers(2, pa.py_buffer(np.array([0, 4, 6], np.int32)), pa.py_buffer(b"null, "))


def sample_lines(step: int, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Text of some lines at a time. Flat arrays of a row come last in its line, with float32 numbers as Python writes them; NaN
    and infinities are null."""
    for start in range(0, len(rows), _ROWS):
        part = rows[start : start + _ROWS]
        names = dict.fromkeys(name for row in part for name, value in row.items() if _is_flat(value))
        texts: list[list[str]] = [[] for _ in part]
        for name in names:
            chosen = [i for i, row in enumerate(part) if _is_flat(row.get(name))]
            for i, values in zip(chosen, _joined([part[i][name] for i in chosen]), strict=True):
                texts[i].append(f', "{name}": [{values}]')
        heads = (json_text({"step": step, **{n: v for n, v in row.items() if not _is_flat(v)}}) for row in part)
        yield "".join(f"{head[:-1]}{''.join(text)}}}\n" for head, text in zip(heads, texts, strict=True))


def _is_flat(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "bif"


def _joined(arrays: Sequence[np.ndarray]) -> list[str]:
    """The numbers of each array as JSON, separated by commas."""
    values = np.concatenate(arrays)
    is_real = values.dtype.kind == "f"
    numbers = _view(values.astype(np.float64), np.isfinite(values)) if is_real else _view(values)
    ends = _view(np.cumsum([0, *map(len, arrays)], dtype=np.int32))
    texts = pa.ListArray.from_arrays(ends, pc.fill_null(pc.cast(numbers, pa.string()), _NULL))
    return pc.binary_join(texts, _COMMA).to_pylist()


def _view(values: np.ndarray, valid: np.ndarray | None = None) -> pa.Array:
    """`values` for pyarrow, null where `valid` is false."""
    data = np.packbits(values, bitorder="little") if values.dtype == bool else values
    bits = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [bits, pa.py_buffer(data)])
