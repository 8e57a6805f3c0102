"""Rows of a training request as columns of a packed forward, and their log-probs back in the form of the request.

Rows that are equal up to their first token that counts, as the samples of one prompt are, share the computation of these
tokens. The predictions inside the shared tokens are read there for one row; a row of each datum has the tokens that follow.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from verl.data_proto.proto import DataProto
from verl.data_proto.trajectory import token_columns
from verl.tinker.records import Datum
from verl.tinker.sum_losses import FROM_CONFIG

_COUNTS = {  # loss -> its input that is 0 for tokens without a part in the sum; dro has none
    "cross_entropy": "weights",
    "importance_sampling": "advantages",
    "ppo": "advantages",
    "cispo": "advantages",
    FROM_CONFIG: "advantages",
}


@dataclass(frozen=True)
class ComputedRow:
    """The predictions of `response` after `prompt`, or if it `is_inside`, of the end of `prompt`; all data `members`
    have from position `first` on."""

    members: list[int]
    first: int
    prompt: np.ndarray
    response: np.ndarray
    is_inside: bool = False

    def part(self, values: np.ndarray) -> np.ndarray:
        """The values [N] or [N, K] of a member at the row's positions, as [response, K]."""
        return values.reshape(len(values), -1)[self.first : self.first + len(self.response)]


def computed_rows(data: Sequence[Datum], loss: str) -> list[ComputedRow]:
    """The rows to compute. The last position of a datum predicts a token that is no input: 0 stands in for it."""
    families: dict[tuple[bytes, ...], list[int]] = {}
    for number, datum in enumerate(data):
        length = prompt_length(datum, loss)
        key = [datum.tokens[:length], *(values[: length - 1] for values in datum.inputs.values())]
        families.setdefault(tuple(values.tobytes() for values in key), []).append(number)
    rows = []
    for members in families.values():
        length = prompt_length(data[members[0]], loss) if len(members) > 1 else 1
        if length > 1:
            tokens = data[members[0]].tokens
            rows.append(ComputedRow(members, 0, tokens[:length], tokens[1:length], is_inside=True))
        for member in members:
            tokens = data[member].tokens
            rows.append(ComputedRow([member], length - 1, tokens[:length], np.append(tokens[length:], 0)))
    return rows


def prompt_length(datum: Datum, loss: str) -> int:
    """Tokens up to the first that counts; 1 if none does."""
    if loss not in _COUNTS:
        return 1
    counts = datum.inputs[_COUNTS[loss]]
    return 1 + int((counts.reshape(len(counts), -1) != 0).any(axis=1).argmax())


def training_columns(data: Sequence[Datum], rows: Sequence[ComputedRow]) -> DataProto:
    """Columns of `rows`. Targets are candidate_ids [rows, response, K], present under target_mask; every further input
    are float32 of that shape. `number` counts the rows."""
    columns = token_columns([(row.prompt, row.response, np.ones(len(row.response), dtype=bool)) for row in rows])
    for name in data[0].inputs:
        parts = [row.part(data[row.members[0]].inputs[name]) for row in rows]
        shape, is_target = (*columns["responses"].shape, max(part.shape[1] for part in parts)), name == "target_tokens"
        stacked = torch.zeros(shape, dtype=torch.int64 if is_target else torch.float32)
        exists = torch.zeros(shape, dtype=torch.bool)
        for number, part in enumerate(parts):
            stacked[number, : part.shape[0], : part.shape[1]] = torch.from_numpy(part)
            exists[number, : part.shape[0], : part.shape[1]] = True
        columns |= {"candidate_ids" if is_target else name: stacked, "target_mask": exists}
    columns |= {"number": torch.arange(len(rows)), "response_is_inside": torch.tensor([row.is_inside for row in rows])}
    return DataProto.from_dict(columns)


def log_probs_of(
    data: Sequence[Datum], rows: Sequence[ComputedRow], computed: Mapping[int, np.ndarray]
) -> list[np.ndarray]:
    """The log-probs of each datum in the shape of its targets, from [response, K] of each row that was computed here."""
    results = [np.zeros(datum.inputs["target_tokens"].shape, np.float32) for datum in data]
    for number, values in computed.items():
        for member in rows[number].members:
            place = rows[number].part(results[member])  # a view
            place[:] = values[: place.shape[0], : place.shape[1]]
    return results
