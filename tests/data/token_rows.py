"""Mutated rows of token ids, and whether `verl check` and the run accept only the right rows.

`expected` defines a right row a second time, for the row as it comes back from the file.
"""

import copy
import json

import pyarrow
import pyarrow.parquet

from tests.json_lines import write_lines
from verl.config.sections.data import SFTDataConfig
from verl.data.conversations.dataset import load_conversations
from verl.data.files import read_rows
from verl.errors import DataError
from verl.models.tiny import make_tokenizer

NUM_EMBEDDINGS = 264
ODD = (
    [-1, -5, 264, 9999, 2**31, 2**32 + 65, 2**63, 10**30, 65.0, 65.7, True, False, None, "65", "", [65], [], {"a": 1}]
    + [float("nan"), float("inf"), 0, 1, 2, 0.5, -100, "0", "01"]
)  # fmt: skip
COLUMNS = ("input_ids", "loss_mask", "labels", "attention_mask")


def tokenizer():
    instance = make_tokenizer()
    instance.num_embeddings = NUM_EMBEDDINGS
    return instance


def good_row(rng):
    length = rng.randrange(2, 12)
    ids = [rng.randrange(NUM_EMBEDDINGS) for _ in range(length)]
    mask = [0, *(rng.randrange(2) for _ in range(length - 2)), 1]
    row = {"input_ids": ids}
    if rng.random() < 0.5:
        row["loss_mask"] = [bool(m) for m in mask] if rng.random() < 0.3 else mask
    else:
        row["labels"] = [token if m else -100 for token, m in zip(ids, mask, strict=True)]
    if rng.random() < 0.3:
        row["attention_mask"] = [1] * length
    return row


def entry(rng, row, column):
    row[column][rng.randrange(len(row[column]))] = rng.choice(ODD)


def length(rng, row, column):
    row[column] = row[column][:-1] if rng.random() < 0.5 else [*row[column], row[column][-1]]


def column_of_another_kind(rng, row, column):
    row[column] = rng.choice([rng.choice(ODD), "0" * len(row[column]), [row[column]], [[x] for x in row[column]], []])


def other_numbers(rng, row, column):
    row[column] = [float(x) for x in row[column]] if rng.random() < 0.5 else [str(x) for x in row[column]]


def column_lost(rng, row, column):
    del row[column]


def nothing(rng, row, column):
    pass


KINDS = (entry, length, column_of_another_kind, other_numbers, column_lost, nothing)


def is_whole(value):
    return isinstance(value, int) and not isinstance(value, bool)


def expected(row):
    """(ids, mask) that the row trains; None if it is wrong."""
    row = {name: row[name] for name in COLUMNS if row.get(name) is not None}
    if any(not isinstance(column, list) or len(column) != len(row.get("input_ids") or []) for column in row.values()):
        return None
    ids = row.get("input_ids", [])
    if not all(is_whole(token) and 0 <= token < NUM_EMBEDDINGS for token in ids):
        return None
    for name in ("loss_mask", "attention_mask"):
        if not all(isinstance(m, int | float) and m in (0, 1) for m in row.get(name, [])):
            return None
    if "loss_mask" in row:
        mask = row["loss_mask"]
    elif "labels" in row and all(is_whole(x) and x in (-100, t) for x, t in zip(row["labels"], ids, strict=True)):
        mask = [label != -100 for label in row["labels"]]
    else:
        return None
    pairs = [(t, bool(m)) for t, m, a in zip(ids, mask, row.get("attention_mask", [1] * len(ids)), strict=True) if a]
    if not any(m for _, m in pairs[1:]):
        return None
    return [t for t, _ in pairs], [False, *(m for _, m in pairs[1:])]


def write(rng, folder, row):
    """`row` as the second row of a file; the first is right."""
    rows = [{"input_ids": [65, 66], "loss_mask": [0, 1]}, row]
    if rng.random() < 0.3:
        path = folder / "rows.parquet"
        try:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
            return path
        except (pyarrow.ArrowException, ValueError, TypeError, OverflowError):
            pass  # such a row cannot be in such a file
    path = folder / "rows.jsonl"
    write_lines(path, rows)
    return path


def outcome(rng, folder, reader):
    row, kind = good_row(rng), rng.choice(KINDS)
    kind(rng, row, rng.choice(sorted(row)))
    path, settings = write(rng, folder, copy.deepcopy(row)), SFTDataConfig()
    checked = load_conversations(str(path), reader, settings, keep_going=True).summaries[0].problems
    try:
        loaded, refused = load_conversations(str(path), reader, settings), None
    except DataError as error:
        loaded, refused = None, str(error)
    assert bool(checked) == (refused is not None), f"verl check says {checked}, the run {refused}: {row}"
    if refused is not None:
        assert str(path) in refused, (row, refused)
        assert refused.isprintable(), refused
        assert len(refused) < 1000, refused
        assert kind is not nothing, (row, refused)
        path.unlink()
        return kind.__name__, "refused"
    row = list(read_rows(str(path)))[-1]
    path.unlink()
    right = expected(json.loads(json.dumps(row)))
    assert right is not None, f"a wrong row is accepted: {row}"
    sequence = loaded[len(loaded) - 1][0]
    assert (sequence.input_ids.tolist(), sequence.loss_mask.tolist()) == right, row
    return kind.__name__, "accepted, valid"


def cases(rng, count, folder):
    """(kind of mutation, outcome) of `count` rows."""
    reader = tokenizer()
    for _ in range(count):
        yield outcome(rng, folder, reader)
