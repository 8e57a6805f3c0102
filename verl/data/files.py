"""Data files as rows: parquet, JSON, JSONL (also gzipped), data sets; rows as parquet."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from verl.data.data_sets import names_builder, open_data_set
from verl.data.tables import JsonTable, ParquetTable, Rows, Table
from verl.errors import DataError
from verl.foreign_text import clean
from verl.regular_files import require_regular

Files = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
SUFFIXES = (".parquet", ".json", ".jsonl", ".json.gz", ".jsonl.gz")


def read_rows(files: Files) -> Rows:
    """The rows of all files, in order.

    A name is a file (.parquet, .json, .jsonl, .gz of the latter two) or a data set (verl/data/data_sets.py): `org/name:split`,
    `parquet:FILES`, or a folder of `datasets.save_to_disk`. Raises DataError for a file that is missing, unreadable, empty
    or of an unknown kind.
    """
    names = [files] if isinstance(files, (str, os.PathLike)) else list(files)
    if not names:
        raise DataError("The list of data files is empty; set data.train_files and data.val_files.")
    return Rows([_open(os.path.expanduser(os.fspath(name))) for name in names])


def _open(name: str) -> Table:
    is_file = name.endswith(SUFFIXES) and not names_builder(name)
    if is_file or not name or (os.path.lexists(name) and not os.path.isdir(name)):
        fix = "Correct the path, or prepare the file with `verl data`."
        table = _open_file(require_regular(name, "The data file", DataError, fix))
    else:
        table = open_data_set(name)
    if len(table) == 0:
        raise DataError(f"The data file {name} has no rows.")
    return table


def _open_file(path: Path) -> Table:
    if path.name.endswith(".parquet"):
        return ParquetTable(path)
    if path.name.endswith(SUFFIXES):
        return JsonTable(path)
    convert = f" Name it csv:{path}:train, or let pandas write it as parquet." if path.suffix == ".csv" else ""
    raise DataError(f"The data file {path} is of an unknown kind; use one of {', '.join(SUFFIXES)}.{convert}")


def write_parquet(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write `path` whole or not at all; makes its folder. A field that a row lacks is null in it. Raises DataError for values
    that parquet cannot hold."""
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        fields = list(dict.fromkeys(name for row in rows for name in row))
        columns = {name: [row.get(name) for row in rows] for name in fields}
        pyarrow.parquet.write_table(pyarrow.table(columns), temporary, write_page_checksum=True)
        os.replace(temporary, path)
    except (
        pyarrow.ArrowException,
        OverflowError,
        UnicodeError,
    ) as error:  # an object without fields, a column of several types
        raise DataError(f"{path} cannot be written as parquet: {clean(error)}. Write .jsonl instead.") from error
    finally:
        temporary.unlink(missing_ok=True)
