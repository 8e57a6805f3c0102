"""Token ids, masks and labels from outside: data files, dataset classes, agents, teachers. Everything that takes them reads
them here.

Errors name the field and the entry; the caller adds file and row, or the episode.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from verl.data_proto.tokenizer import Tokenizer
from verl.errors import DataError
from verl.foreign_text import quoted

IGNORED = -100  # as a label: the token does not train
_MAX_IDS = 1 << 31  # ids are stored as int32


def num_embeddings(tokenizer: Tokenizer) -> int:
    """The number of embeddings of the model that `tokenizer` belongs to, as load_tokenizer has set it; 2**31 if unknown."""
    return getattr(tokenizer, "num_embeddings", None) or _MAX_IDS


def token_ids(value: object, field: str, limit: int = _MAX_IDS) -> np.ndarray:
    """The token ids in `value`, int32 [tokens]. Raises DataError unless it is a list of integers from 0 to `limit` - 1."""
    items = _list(value, field, "token ids")
    if are_whole(items) and (not items or (min(items) >= 0 and max(items) < limit)):
        return np.array(items, dtype=np.int32)
    place, wrong = next((i, x) for i, x in enumerate(items) if not are_whole([x]) or not 0 <= x < limit)
    raise DataError(
        f"field '{field}[{place}]' is {quoted(wrong, 40)}; a token id is a whole number from 0 to {limit - 1}"
        + (f", since the model has {limit:,} embeddings." if limit != _MAX_IDS else ".")
    )


def token_mask(value: object, field: str, length: int) -> np.ndarray:
    """The mask in `value`, bool [tokens]. Raises DataError unless it is a list of `length` entries that are 0 or 1, or false or
    true."""
    items = _list(value, field, "0 and 1")
    if len(items) != length:
        raise DataError(f"field {field!r} has {len(items)} entries for {length} tokens; give one for each.")
    for place, item in enumerate(items):
        if not isinstance(item, int | float | np.number | np.bool_) or item not in (0, 1):
            raise DataError(f"field '{field}[{place}]' is {quoted(item, 40)}; write 0 or 1.")
    return np.array(items, dtype=np.bool_)


def label_mask(value: object, field: str, ids: np.ndarray) -> np.ndarray:
    """True if the label in `value` trains, bool [tokens]. Raises DataError unless each is -100 or the id of `ids` [tokens]
    at its place."""
    items = _list(value, field, "labels")
    if len(items) != len(ids):
        raise DataError(f"field {field!r} has {len(items)} entries for {len(ids)} tokens; give one for each.")
    for place, (label, token) in enumerate(zip(items, ids.tolist(), strict=True)):
        if not are_whole([label]) or label not in (IGNORED, token):
            raise DataError(
                f"field '{field}[{place}]' is {quoted(label, 40)} and the token there is {token}: labels differ from input_ids "
                "where they train. Labels of a causal language model are its inputs, or -100."
            )
    return np.array(items) != IGNORED if items else np.zeros(0, dtype=np.bool_)


def _list(value: object, field: str, what: str) -> list[Any]:
    items = value.tolist() if hasattr(value, "tolist") else value  # of numpy and torch
    if not isinstance(items, list | tuple):
        raise DataError(f"field {field!r} must be a list of {what}, but it is {quoted(value, 80)}.")
    return list(items)


def are_whole(items: Sequence[object]) -> bool:
    """Whether all are integers of Python or numpy, and no booleans."""
    return all(issubclass(kind, int | np.integer) and kind is not bool for kind in set(map(type, items)))


def num_common(first: Sequence[object], second: Sequence[object]) -> int:
    """Number of equal entries at the beginning of both."""
    unequal = (number for number, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    return next(unequal, min(len(first), len(second)))
