"""Training sequences of rows in flat arrays: a few bytes for each token, in memory or as a memory map of the user's cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

# fields of sequences: arrays with a value for each token or step, and numbers
_ARRAYS = {"input_ids": np.int32, "loss_mask": np.bool_, "completion_mask": np.bool_, "labels": np.bool_}
_NUMBERS = {"num_behind": np.int64, "chosen": np.bool_, "margin": np.float64, "rating": np.float64}
_Columns = Mapping[str, np.ndarray]


def columns_of(kind: type[object], rows: Sequence[Sequence[object]]) -> dict[str, np.ndarray]:
    """The sequences of `rows`, of the dataclass `kind`, as columns: num_sequences [rows], and for each field its values
    [sequences], or its arrays end to end with NAME_sizes [sequences]."""
    sequences = [sequence for row in rows for sequence in row]
    columns = {"num_sequences": np.array([len(row) for row in rows], dtype=np.int32)}
    for name in _names(kind):
        values = [getattr(sequence, name) for sequence in sequences]
        if name in _NUMBERS:
            columns[name] = np.array(values, dtype=_NUMBERS[name])
        else:
            arrays = [np.empty(0, dtype=_ARRAYS[name]) if value is None else value for value in values]
            columns[name] = np.concatenate([np.empty(0, dtype=_ARRAYS[name]), *arrays]).astype(
                _ARRAYS[name], copy=False
            )
            columns[f"{name}_sizes"] = np.array([len(array) for array in arrays], dtype=np.int32)
    return columns


def _names(kind: type[Any]) -> list[str]:
    return [field.name for field in fields(kind) if field.name != "images"]  # which the rows of the files have


class SequenceStore(Sequence[list[object]]):
    """The list of sequences of each row, of the dataclass `kind`; columns of several files follow each other."""

    def __init__(self, kind: type[object]):
        self.kind = kind
        self._files: list[dict[str, np.ndarray]] = []
        self._ends: list[int] = []  # rows up to the end of each file

    def add(self, columns: _Columns) -> None:
        """Append the rows of `columns_of`."""
        starts = {
            f"{name}_starts": np.concatenate([[0], np.cumsum(columns[sizes], dtype=np.int64)])
            for name in ("row", *_names(self.kind))
            if (sizes := "num_sequences" if name == "row" else f"{name}_sizes") in columns
        }
        self._files.append({**columns, **starts})
        self._ends.append(len(self) + len(columns["num_sequences"]))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def locate(self, row: int) -> tuple[int, int]:
        """(file, row in it) of a row."""
        if not 0 <= row < len(self):
            raise IndexError(row)
        file = int(np.searchsorted(self._ends, row, side="right"))
        return file, row - (self._ends[file - 1] if file else 0)

    def __getitem__(self, row: Any) -> Any:
        file, number = self.locate(row)
        columns = self._files[file]
        first, end = columns["row_starts"][number : number + 2].tolist()
        return [self._sequence(columns, index) for index in range(first, end)]

    def _sequence(self, columns: _Columns, index: int) -> object:
        values: dict[str, object] = {}
        for name in _names(self.kind):
            if name in _NUMBERS:
                values[name] = columns[name][index].item()
            else:
                start, end = columns[f"{name}_starts"][index : index + 2].tolist()
                values[name] = columns[name][start:end].copy() if end > start else None  # the store is never written
        return self.kind(**values)
