"""Data files as rows: parquet, JSON, JSONL (also gzipped), data sets of the `datasets` package; rows as parquet."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from verl.data.row_cache import cached_path, key_of, mark_used, new_entry
from verl.errors import DataError
from verl.foreign_text import clean, quoted
from verl.models.content import digest_of_files, digest_of_text
from verl.regular_files import require_regular

SUFFIXES = (".parquet", ".json", ".jsonl", ".json.gz", ".jsonl.gz")
_MAPPED_BYTES = 256 << 20  # of the columns of a parquet file, before its codec; a larger one is not held in memory
_ROWS_READ = 65_536  # at once


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError, also where an object has a key twice and where the nesting is too deep."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"an object has the key {quoted(twice)} twice")
    return entries


class Table(Protocol):
    """Rows of one file, decoded when they are asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> dict[str, Any]: ...

    def batch(self, rows: np.ndarray, field: str | None) -> list[dict[str, Any]]:
        """`self[row]` of each, with all fields or only that one."""
        ...

    def texts(self, field: str) -> set[str]:
        """The different texts of a field."""
        ...

    def digest(self) -> str | None:
        """The digest of the file; None where it is not known."""
        ...

    def place(self, row: int) -> str:
        """File and row number, as its author counts: rows from 0, lines from 1."""
        ...


class ParquetTable:
    def __init__(self, path: Path):
        import pyarrow
        import pyarrow.parquet

        self.path = path
        try:
            # read_table would add columns from a=b folders
            self.table = self._read(pyarrow.parquet.ParquetFile(path, page_checksum_verification=True))
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
            raise DataError(f"{path} cannot be read as parquet: {clean(error)}. Write or download it again.") from error
        if twice := [name for name, count in Counter(self.table.column_names).items() if count > 1]:
            raise DataError(f"{path} has several columns {quoted(twice[0])}; keep one of them.")

    def _read(self, file: Any) -> Any:
        """The rows of a large file, as a memory map of its copy in the cache, since parquet cannot be read by row.

        Rows of other files are in memory, and rows whose copy cannot be written or read.
        """
        import pyarrow.ipc

        footer = file.metadata
        size = sum(footer.row_group(group).total_byte_size for group in range(footer.num_row_groups))
        path = cached_path(f"{key_of('rows', self.digest())}.arrow") if size > _MAPPED_BYTES else None
        if path is not None:
            with contextlib.suppress(OSError, pyarrow.ArrowException):  # a full disk, or a damaged copy
                if not mark_used(path):
                    with new_entry(path) as temporary, pyarrow.ipc.new_file(temporary, file.schema_arrow) as writer:
                        for batch in file.iter_batches(_ROWS_READ):
                            writer.write_batch(batch)
                return pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all()
        return file.read()

    def __len__(self) -> int:
        return self.table.num_rows

    def batch(self, rows: np.ndarray, field: str | None) -> list[dict[str, Any]]:
        table = self.table if field is None else self.table.select([field] if field in self.table.column_names else [])
        first, last = int(rows[0]), int(rows[-1])
        follow = last - first + 1 == len(rows) and bool((np.diff(rows) == 1).all())
        try:
            return (table.slice(first, len(rows)) if follow else table.take(rows)).to_pylist()
        except (ValueError, OverflowError) as error:
            raise DataError(f"{self.path} holds a value that cannot be read: {clean(error)}") from error

    def texts(self, field: str) -> set[str]:
        if field not in self.table.column_names:
            return set()
        return {value for value in self.table[field].unique().to_pylist() if isinstance(value, str)}

    def digest(self) -> str | None:
        return digest_of_files([self.path])

    def __getitem__(self, row: int) -> dict[str, Any]:
        try:
            return self.table.slice(row, 1).to_pylist()[0]
        except (ValueError, OverflowError) as error:  # text that is not UTF-8, a date after the year 9999
            raise DataError(f"{self.place(row)} holds a value that cannot be read: {clean(error)}") from error

    def place(self, row: int) -> str:
        return f"{self.path}, row {row} (counted from 0)"


class JsonTable:
    """Objects of a JSON file: one list of them, or one a line; empty lines are skipped."""

    def __init__(self, path: Path):
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.lines: list[int] = []  # of each row, from 1; empty when the file is one JSON value
        opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
        try:
            with opener(path, "rt", encoding="utf-8-sig") as file:  # some editors begin a file with a byte order mark
                text = file.read()
        except UnicodeDecodeError as error:
            raise DataError(f"{path} cannot be read as text: {error}. Save it as UTF-8.") from error
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path} cannot be read as text: {error}") from error
        if ".jsonl" in path.name or not text.lstrip().startswith("["):
            self._read_lines(text)
        else:
            self._read_list(text)
        for row in range(len(self.rows)):
            if not isinstance(self.rows[row], dict):
                kind = type(self.rows[row]).__name__
                raise DataError(
                    f"{self.place(row)} is a {kind}; every row must be a JSON object with the fields of a row."
                )

    def _read_lines(self, text: str) -> None:
        # not splitlines(): JSON strings may hold U+2028 and other line separators
        for number, line in enumerate(text.split("\n"), start=1):
            if not line.strip():
                continue
            self.lines.append(number)
            try:
                self.rows.append(parse_json(line))
            except ValueError as error:
                raise DataError(f"{self.place(len(self.rows))} is not valid JSON: {clean(error)}") from error

    def _read_list(self, text: str) -> None:
        try:
            self.rows = parse_json(text)
        except ValueError as error:
            raise DataError(f"{self.path} is not valid JSON: {clean(error)}") from error

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, rows: np.ndarray, field: str | None) -> list[dict[str, Any]]:
        return [self.rows[row] for row in rows]

    def texts(self, field: str) -> set[str]:
        return {value for row in self.rows if isinstance(value := row.get(field), str)}

    def digest(self) -> str | None:
        return digest_of_files([self.path])

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.rows[row]

    def place(self, row: int) -> str:
        line = f", line {self.lines[row]}" if self.lines else ""
        return f"{self.path}, row {row} (counted from 0{line})"


class HuggingFaceTable:
    """One split of a data set of the `datasets` package."""

    def __init__(self, dataset: Any, name: str):
        self.dataset = dataset
        self.name = name

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, rows: np.ndarray, field: str | None) -> list[dict[str, Any]]:
        return [self[int(row)] for row in rows]

    def texts(self, field: str) -> set[str]:
        values = self.dataset.unique(field) if field in self.dataset.column_names else []
        return {value for value in values if isinstance(value, str)}

    def digest(self) -> str | None:
        return getattr(self.dataset, "_fingerprint", None)

    def __getitem__(self, row: int) -> dict[str, Any]:
        try:
            return dict(self.dataset[row])
        except Exception as error:
            # a data set decodes its columns by whatever its author chose
            raise DataError(f"{self.place(row)} cannot be read: {type(error).__name__}: {clean(error)}") from error

    def place(self, row: int) -> str:
        return f"data set {self.name}, row {row} (counted from 0)"


class Rows(Sequence[dict[str, Any]]):
    """Rows of several files, one after the other, or a selection of them."""

    def __init__(self, tables: Sequence[Table], chosen: np.ndarray | None = None):
        self._tables = tables
        self._ends = np.cumsum([len(table) for table in tables])
        self._chosen = np.arange(self._ends[-1]) if chosen is None else chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def _locate(self, row: int) -> tuple[Table, int]:
        number = int(self._chosen[row])
        index = int(np.searchsorted(self._ends, number, side="right"))
        return self._tables[index], number - (int(self._ends[index - 1]) if index else 0)

    def __getitem__(self, row: Any) -> Any:
        table, number = self._locate(row)
        return dict(table[number])

    def batch(self, rows: range, field: str | None = None) -> list[dict[str, Any]]:
        """`self[row]` of each of `rows`, all of their fields or only `field`. Raises DataError, which may not name the row."""
        numbers = self._chosen[rows.start : rows.stop]
        if not len(numbers):
            return []
        table_of = np.searchsorted(self._ends, numbers, side="right")
        batch: list[dict[str, Any]] = []
        for part in np.split(numbers, np.flatnonzero(np.diff(table_of)) + 1):
            index = int(table_of[len(batch)])
            start = int(self._ends[index - 1]) if index else 0
            batch += map(dict, self._tables[index].batch(part - start, field))
        return batch

    def texts(self, field: str) -> set[str] | None:
        """The different texts of a field; None for a selection of the rows, whose texts only their rows tell."""
        if len(self._chosen) < self._ends[-1]:
            return None
        return set().union(*(table.texts(field) for table in self._tables))

    def digest(self) -> str | None:
        """The digest of these rows in this order; None where it is not known."""
        digests = [table.digest() for table in self._tables]
        if None in digests:
            return None
        chosen = hashlib.blake2b(self._chosen.tobytes(), digest_size=16).hexdigest()
        return digest_of_text(*map(str, digests), chosen)

    def place(self, row: int) -> str:
        """File and row number in that file."""
        table, number = self._locate(row)
        return table.place(number)

    def select(self, rows: Iterable[int]) -> Rows:
        """Those rows, in that order; each keeps its place."""
        return Rows(self._tables, self._chosen[np.fromiter(rows, dtype=np.int64)])


def read_rows(files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> Rows:
    """The rows of all files, in order.

    A name is a file (.parquet, .json, .jsonl, .gz of the latter two), a folder of `datasets.save_to_disk`, or whatever
    `datasets.load_dataset` knows; `name@split` chooses a split of the last two. Raises DataError for a file that is
    missing, unreadable, empty or of an unknown kind.
    """
    names = [files] if isinstance(files, (str, os.PathLike)) else list(files)
    if not names:
        raise DataError("The list of data files is empty; set data.train_files and data.val_files.")
    return Rows([_open(os.path.expanduser(os.fspath(name))) for name in names])


def _open(name: str) -> Table:
    if name.endswith(SUFFIXES) or not name or (os.path.lexists(name) and not os.path.isdir(name)):
        fix = "Prepare it with `verl data`, or correct data.train_files or data.val_files."
        table = _open_file(require_regular(name, "The data file", DataError, fix))
    else:
        table = _open_dataset(name)
    if len(table) == 0:
        raise DataError(f"The data file {name} has no rows.")
    return table


def _open_file(path: Path) -> Table:
    if path.name.endswith(".parquet"):
        return ParquetTable(path)
    if path.name.endswith(SUFFIXES):
        return JsonTable(path)
    raise DataError(f"The data file {path} is of an unknown kind; use one of {', '.join(SUFFIXES)}.")


def _open_dataset(name: str) -> Table:
    path, _, split = (name, "", "") if Path(name).exists() else name.partition("@")
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{path} is not a file, and data sets need the package 'datasets'. Correct it or pip install datasets."
        ) from error
    datasets.disable_progress_bars()
    saved = any((Path(path) / marker).is_file() for marker in ("dataset_dict.json", "state.json"))
    try:
        loaded: Any = datasets.load_from_disk(path) if saved else datasets.load_dataset(path)
    except Exception as error:
        # loading runs other people's code and network clients, which raise anything
        raise DataError(
            f"{path} is neither a file nor a data set that can be loaded: {type(error).__name__}: {clean(error)}"
        ) from error
    if not isinstance(loaded, datasets.DatasetDict):
        return HuggingFaceTable(loaded, path)
    if not split and len(loaded) == 1:
        split = next(iter(loaded))
    if split not in loaded:
        asked = f"has no split {split!r}" if split else "has several splits"
        raise DataError(f"The data set {path} {asked}; write {path}@SPLIT with one of {', '.join(loaded)}.")
    return HuggingFaceTable(loaded[split], f"{path}@{split}")


def write_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> None:
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
