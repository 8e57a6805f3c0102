"""Rows that Python code gives, as rows of a file: lists, data frames and data sets of dicts."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from verl.data.messages import CHAT_COLUMNS, unfilled
from verl.data.pictures import image_text
from verl.data.schema import MEDIA_PARTS, SOURCES
from verl.data.tables import ArrowRow
from verl.errors import DataError
from verl.foreign_text import quoted

Row = Mapping[str, Any]
Rows = str | list[Any]
Data = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Iterable[Row]

_ROW_FIELDS = ("prompt", "data_source", "reward_model", "extra_info", "agent_name", "ability")
_MEDIA_FIELDS = ("images", "videos")


def prompt_row(
    row: Row, number: int, media: Sequence[str] = _MEDIA_FIELDS, names: tuple[str, str] = ("prompt", "data_source")
) -> dict[str, Any]:
    """A row of docs/data.md from a dict with a prompt (text or messages), the fields `media` of images and videos, and other
    columns for reward functions. The reference answer is `reward_model.ground_truth`, "ground_truth" or "answer". `names` are
    `data.prompt_key` and `data.reward_fn_key`; a prompt may be called "prompt" all the same.

    Raises DataError without a prompt.
    """
    prompt_key, source_key = names
    row = checked_row(unfilled(row, ("prompt", prompt_key, *CHAT_COLUMNS)), number)
    if prompt_key not in row and "prompt" not in row:
        raise DataError(
            f"Row {number} of the data has no {prompt_key!r}, a text or messages; it has {', '.join(map(str, row))}. "
            "Rename a column, or name it by data.prompt_key."
        )
    columns = {name: value for name, value in row.items() if name not in ("extra_info", *media)}
    extra = row.get("extra_info") or {}
    if not isinstance(extra, Mapping):
        raise DataError(
            f"Row {number} of the data has {quoted(extra, 80)} as 'extra_info'; give a dict, or leave it out."
        )
    for name in columns.keys() & extra.keys() - {*_ROW_FIELDS}:
        if not _is_equal(columns[name], extra[name]):
            raise DataError(
                f"Row {number} of the data has {name!r} twice, as a column and in extra_info. Keep one of them."
            )
    with suppress(RecursionError):  # writing the row says so
        if place := next(_binaries({**columns, "extra_info": extra}, ""), ""):
            raise DataError(
                f"Row {number} of the data has a picture or bytes in {place[1:]!r}, which would reach the reward function as a "
                f"text. Give a text, or put pictures into {' or '.join(media)}."
            )
    answer = row.get("ground_truth", row.get("answer"))
    return {
        **{name: row[name] for name in (*_ROW_FIELDS, *CHAT_COLUMNS, *media) if name in row},
        prompt_key: row[prompt_key if prompt_key in row else "prompt"],
        source_key: row.get(source_key) or "data",
        "reward_model": row.get("reward_model") or ({"style": "model"} if answer is None else {"ground_truth": answer}),
        "extra_info": {"index": number, "data_source": "data", **columns, **extra},
    }


def listed_rows(split: str, data: Data) -> Rows:
    """`data` as a list, for every reader the same; a path is left. Raises DataError for what is no list of rows."""
    if isinstance(data, str | os.PathLike):
        return os.fspath(data)
    if hasattr(data, "to_dict") and hasattr(data, "isna"):  # a pandas.DataFrame: it iterates over its columns
        missing = data.isna()  # NaN: None in every other kind of rows
        if twice := [name for name, count in Counter(missing.columns).items() if count > 1]:
            raise DataError(f"The {split} data have several columns {twice[0]!r}; keep one of them.")
        rows = zip(data.to_dict("records"), missing.to_dict("records"), strict=True)
        return [{name: None if gone[name] else value for name, value in row.items()} for row, gone in rows]
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        splits = (
            f" (of a DatasetDict one split, such as data[{next(iter(data))!r}])"
            if isinstance(data, Mapping) and data
            else ""
        )
        raise DataError(
            f"The {split} data are a {type(data).__name__}. Give a list of rows, or paths of data files{splits}."
        )
    listed: list[Any] = list(data)
    return [ArrowRow(row) for row in listed] if hasattr(data, "features") else listed  # of a datasets.Dataset


def checked_row(row: Row, number: int) -> Row:
    if not isinstance(row, Mapping):
        raise DataError(f"Row {number} of the data is a {type(row).__name__}; a row is a dict.")
    if "images" not in row and is_picture(row.get("image")):  # TRL's column of one image
        return {name: value for name, value in row.items() if name != "image"} | {"images": [row["image"]]}
    return row


def row_as_json(row: Row, number: int) -> str:
    """`row` as JSON, arrays as lists, pictures and bytes as data URLs. Raises DataError for a value without a form in JSON."""
    try:
        return json.dumps(row, default=_json_form)
    except RecursionError:
        raise DataError(f"Row {number} of the data is nested too deep; make it flat.") from None
    except (TypeError, ValueError) as error:
        raise DataError(
            f"Row {number} of the data cannot be written: {error}. Give numbers, texts, lists and dicts."
        ) from error


def is_picture(value: object) -> bool:
    """Whether a value is a picture of PIL, or the bytes of a file."""
    return isinstance(value, bytes) or hasattr(value, "getbands")


def _is_equal(value: Any, other: Any) -> bool:
    try:
        return bool(value == other)
    except ValueError:  # of arrays
        return repr(value) == repr(other)


def _binaries(value: Any, place: str) -> Iterator[str]:
    """Places of pictures and bytes outside of the parts of messages."""
    if is_picture(value) or isinstance(value, bytearray | memoryview):
        yield place
    elif isinstance(value, Mapping):
        sources = SOURCES if value.get("type") in MEDIA_PARTS else ()
        for name, inner in value.items():
            if name not in sources and not isinstance(inner, str):
                yield from _binaries(inner, f"{place}.{name}")
    elif isinstance(value, list | tuple) or getattr(getattr(value, "dtype", None), "kind", "") in ("O", "S"):
        for number, inner in enumerate(value):
            if not isinstance(inner, str | int | float):
                yield from _binaries(inner, f"{place}[{number}]")


def _json_form(value: object) -> object:
    if is_picture(value):
        return image_text(value, "The image")
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"JSON has no form for a {type(value).__name__}")
