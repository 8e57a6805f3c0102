"""Rows that are token ids already, as training sequences."""

from __future__ import annotations

from collections.abc import Mapping

from verl.data.conversations.tokens import TrainingSequence
from verl.data.schema import at
from verl.data_proto.token_ids import label_mask, token_ids, token_mask
from verl.errors import DataError

_COLUMNS = ("input_ids", "loss_mask", "labels", "attention_mask")


def tokenized(row: Mapping[str, object], place: str, vocab_size: int) -> TrainingSequence:
    """The sequence of a row with input_ids [tokens] below `vocab_size`, and loss_mask or labels (-100: does not train)
    [tokens]; attention_mask where they are padded. Raises DataError naming `place`."""
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
