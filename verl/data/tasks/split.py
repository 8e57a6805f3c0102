"""Rows of a file of the user's own divided into rows to train on and rows held out; rows of one prompt stay together."""

import json
import random
import re
from collections.abc import Mapping
from pathlib import Path

from verl.data.files import read_rows, write_parquet
from verl.errors import DataError
from verl.foreign_text import quoted

ANSWERS = ("chosen", "rejected", "completion")
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}
_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")


def turns(text: str, first: str) -> list[dict[str, str]]:
    """Messages of a text in the form of Anthropic's data; the role `first` says what stands before any speaker."""
    parts = _TURN.split(text)
    roles = [first, *(_SPEAKERS[speaker] for speaker in parts[1::2])]
    said = zip(roles, (part.strip() for part in parts[::2]), strict=True)
    return [{"role": role, "content": content} for role, content in said if content]


def as_chat(row: Mapping[str, object], key: str) -> dict[str, object]:
    """The row with its texts as messages: the prompt, field `key`, begins with the user, an answer with the assistant."""
    first = {key: "user", **dict.fromkeys(ANSWERS, "assistant")}
    return {name: turns(v, first[name]) if name in first and isinstance(v, str) else v for name, v in row.items()}


def prepare(source: Path, output: Path, *, share: float, key: str, seed: int, chat: bool) -> list[str]:
    """Write `output`/{train,test}.parquet; returns one line per file. Prompts, the values of field `key`, are chosen at random
    for the test file until it has `share` of the rows. Raises DataError for a row without a prompt, and for fewer than two
    prompts."""
    rows = read_rows(source)
    by_prompt: dict[str, list[dict[str, object]]] = {}
    for place in range(len(rows)):
        row = rows[place]
        if row.get(key) is None:
            raise DataError(
                f"{rows.place(place)} has no field {quoted(key)}, by which rows are divided; name it by --key."
            )
        by_prompt.setdefault(json.dumps(row[key], default=str), []).append(as_chat(row, key) if chat else row)
    if len(by_prompt) < 2:
        raise DataError(f"All rows of {source} have one prompt, so that none can be held out.")
    train, test = list(by_prompt.values()), list[dict[str, object]]()
    random.Random(seed).shuffle(train)
    while len(train) > 1 and (not test or len(test) < share * len(rows)):
        test += train.pop()
    lines = []
    for split, split_rows in (("train", [row for group in train for row in group]), ("test", test)):
        write_parquet(output / f"{split}.parquet", split_rows)
        lines.append(f"{output / f'{split}.parquet'}: {len(split_rows)} rows")
    return lines
