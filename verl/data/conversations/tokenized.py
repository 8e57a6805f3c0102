"""Rows of token ids with the tokens that train, one sequence or several of them."""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from verl.data.conversations.tokens import TrainingSequence
from verl.data.schema import at
from verl.data_proto.token_ids import label_mask, token_ids, token_mask
from verl.errors import DataError

_COLUMNS = ("input_ids", "loss_mask", "labels", "attention_mask")


def tokenized_sequences(row: Mapping[str, Any], place: str, vocab_size: int) -> list[TrainingSequence]:
    """The sequences of a row that train: its one (see `tokenized`), or those of the lengths in its field `seq_lengths`, as TRL
    packs rows. Raises DataError naming `place`."""
    if row.get("seq_lengths") is None:
        return [tokenized(row, place, vocab_size)]
    columns = {name: _flat(row[name]) for name in _COLUMNS if row.get(name) is not None}
    lengths = _flat(row["seq_lengths"])
    is_sizes = all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in lengths)
    if not is_sizes or any(len(column) != sum(lengths) for column in columns.values()):
        raise DataError(
            f"{place}: seq_lengths must be whole numbers above 0 whose sum is the length of {' and of '.join(columns)}."
        )
    bounds = list(itertools.pairwise(itertools.accumulate(lengths, initial=0)))
    sequences = [{name: column[slice(*bound)] for name, column in columns.items()} for bound in bounds]
    trains = [
        s for s in sequences if any(v != -100 for v in s.get("labels", ())[1:]) or any(s.get("loss_mask", ())[1:])
    ]
    return [tokenized(sequence, place, vocab_size) for sequence in trains or sequences]


def _flat(values: object) -> list[Any]:
    return list(np.array(values, dtype=object).ravel())


def tokenized(row: Mapping[str, object], place: str, vocab_size: int) -> TrainingSequence:
    """The sequence of a row with input_ids [tokens] below `vocab_size`, and loss_mask or labels (-100: does not train)
    [tokens]; attention_mask if they are padded. Raises DataError naming `place`."""
    columns = {name: row[name] for name in _COLUMNS if row.get(name) is not None}
    if "input_ids" not in columns or not {"loss_mask", "labels"} & set(columns):
        lacks = "loss_mask or labels" if "input_ids" in columns else "input_ids"
        raise DataError(f"{place} has no {lacks}; give it both.")
    with at(place):
        ids = token_ids(columns["input_ids"], "input_ids", vocab_size)
        mask = (
            token_mask(columns["loss_mask"], "loss_mask", len(ids))
            if "loss_mask" in columns
            else label_mask(columns["labels"], "labels", ids)
        )
        if "attention_mask" in columns:
            exists = token_mask(columns["attention_mask"], "attention_mask", len(ids))
            ids, mask = ids[exists], mask[exists]
    mask[:1] = False
    if not mask.any():
        raise DataError(f"{place} has no token that trains; leave it out.")
    return TrainingSequence(ids, mask)
