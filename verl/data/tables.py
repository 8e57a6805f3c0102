"""Rows of tables: of parquet, JSON and JSONL files (also gzipped), and of pyarrow."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl.data.row_cache import cached_path, key_of, new_entry, read_entry
from verl.errors import DataError
from verl.foreign_text import clean, quoted
from verl.models.content import digest_of_files, digest_of_text

_MAPPED_BYTES = 256 << 20  # of the columns of a parquet file, before its codec; a larger one is not held in memory
ROWS_READ = 65_536  # at once

# file of rows that Python code or a command line has given -> a row's name in messages, for its number
NAMES_OF_ROWS: dict[str, Callable[[int], str]] = {}


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError, also if an object has a key twice or the nesting is too deep."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _object(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"an object has the key {quoted(twice)} twice")
    return entries


class ArrowRow(dict[str, Any]):
    """A row of arrow. An object in it has the fields of all objects of its column, null if it lacks the field."""


def copy_of_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row as a dict of its kind."""
    return ArrowRow(row) if isinstance(row, ArrowRow) else dict(row)


class Table:
    """Rows of one file, decoded when they are asked for. `name` is its place, for messages."""

    name: str

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, row: int) -> dict[str, Any]:
        raise NotImplementedError

    def batch(self, rows: np.ndarray, fields: Collection[str] | None) -> list[dict[str, Any]]:
        """`self[row]` of each, with all fields or only some."""
        raise NotImplementedError

    def texts(self, field: str) -> set[str]:
        """The different texts of a field."""
        raise NotImplementedError

    def digest(self) -> str | None:
        """The digest of the file; None if it is not known."""
        return None

    def place(self, row: int) -> str:
        """File and row number, as its author counts: rows from 0, lines from 1."""
        return f"{self.name}, row {row} (counted from 0)"


class ArrowTable(Table):
    """Rows of a table of pyarrow."""

    def __init__(self, table: Any, name: str, digest: str | None = None):
        self.table, self.name, self._digest = table, name, digest

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def digest(self) -> str | None:
        return self._digest

    def batch(self, rows: np.ndarray, fields: Collection[str] | None) -> list[dict[str, Any]]:
        names = self.table.column_names
        table = self.table if fields is None else self.table.select([name for name in names if name in fields])
        first, last = int(rows[0]), int(rows[-1])
        follow = last - first + 1 == len(rows) and bool((np.diff(rows) == 1).all())
        try:
            values = (table.slice(first, len(rows)) if follow else table.take(rows)).to_pylist()
            return list(map(ArrowRow, values))
        except (ValueError, OverflowError) as error:
            raise DataError(f"{self.name} holds a value that cannot be read: {clean(error)}") from error

    def texts(self, field: str) -> set[str]:
        if field not in self.table.column_names:
            return set()
        return {value for value in self.table[field].unique().to_pylist() if isinstance(value, str)}

    def __getitem__(self, row: int) -> dict[str, Any]:
        try:
            return ArrowRow(self.table.slice(row, 1).to_pylist()[0])
        except (ValueError, OverflowError) as error:  # text that is not UTF-8, a date after the year 9999
            raise DataError(f"{self.place(row)} holds a value that cannot be read: {clean(error)}") from error


class ParquetTable(ArrowTable):
    def __init__(self, path: Path):
        import pyarrow
        import pyarrow.parquet

        self.path = path
        try:
            # read_table would add columns from a=b folders
            super().__init__(self._read(pyarrow.parquet.ParquetFile(path, page_checksum_verification=True)), str(path))
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
            raise DataError(f"{path} cannot be read as parquet: {clean(error)}. Write or download it again.") from error
        if twice := [name for name, count in Counter(self.table.column_names).items() if count > 1]:
            raise DataError(f"{path} has several columns {quoted(twice[0])}; keep one of them.")

    def _read(self, file: Any) -> object:
        """The rows in memory; of a large file a memory map of its copy in the cache, since parquet cannot be read by row."""
        import pyarrow

        footer = file.metadata
        size = sum(footer.row_group(group).total_byte_size for group in range(footer.num_row_groups))
        if size > _MAPPED_BYTES:
            with contextlib.suppress(OSError, pyarrow.ArrowException):  # a full disk, or a damaged copy
                return mapped_rows(key_of("rows", self.digest()), file.schema_arrow, file.iter_batches(ROWS_READ))
        return file.read()

    def digest(self) -> str | None:
        return digest_of_files([self.path])


def mapped_rows(key: str | None, schema: object, batches: Iterable[object]) -> object:
    """A memory map of the cache's entry for `key`; a missing entry is written from `batches`. Raises OSError for a cache that
    cannot be written."""
    import pyarrow.ipc

    path = cached_path(f"{key}.arrow")
    if key is None or path is None:
        raise OSError("the cache of rows cannot be written; set VERL_DATA_CACHE to a folder that can")
    content = read_entry(path)
    if content is None:
        with new_entry(path) as temporary, pyarrow.ipc.new_file(temporary, schema) as writer:
            for batch in batches:
                writer.write(batch)
        content = read_entry(path)
    if content is None:
        raise OSError(f"{path} is damaged as soon as it is written")
    return pyarrow.ipc.open_file(pyarrow.py_buffer(content)).read_all()


class JsonTable(Table):
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

    def batch(self, rows: np.ndarray, fields: Collection[str] | None) -> list[dict[str, Any]]:
        return [self.rows[row] for row in rows]

    def texts(self, field: str) -> set[str]:
        return {value for row in self.rows if isinstance(value := row.get(field), str)}

    def digest(self) -> str | None:
        return digest_of_files([self.path])

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.rows[row]

    def place(self, row: int) -> str:
        if name := NAMES_OF_ROWS.get(str(self.path)):
            return name(row)
        line = f", line {self.lines[row]}" if self.lines else ""
        return f"{self.path}, row {row} (counted from 0{line})"


class Rows(Sequence[dict[str, object]]):
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
        return copy_of_row(table[number])

    def batch(self, rows: range, fields: Collection[str] | None = None) -> list[dict[str, object]]:
        """`self[row]` of each of `rows`, all fields or only `fields`. Raises DataError, perhaps without the row's name."""
        numbers = self._chosen[rows.start : rows.stop]
        if not len(numbers):
            return []
        table_of = np.searchsorted(self._ends, numbers, side="right")
        batch: list[dict[str, object]] = []
        for part in np.split(numbers, np.flatnonzero(np.diff(table_of)) + 1):
            index = int(table_of[len(batch)])
            start = int(self._ends[index - 1]) if index else 0
            batch += map(copy_of_row, self._tables[index].batch(part - start, fields))
        return batch

    def texts(self, field: str) -> set[str] | None:
        """The different texts of a field; None for a selection of the rows, since only these rows tell their texts."""
        if len(self._chosen) < self._ends[-1]:
            return None
        return set().union(*(table.texts(field) for table in self._tables))

    def digest(self) -> str | None:
        """The digest of these rows in this order; None if it is not known."""
        digests = [table.digest() for table in self._tables]
        if None in digests:
            return None
        chosen = hashlib.blake2b(self._chosen.tobytes(), digest_size=16).hexdigest()
        return digest_of_text(*map(str, digests), chosen)

    def place(self, row: int) -> str:
        table, number = self._locate(row)
        return table.place(number)

    def select(self, rows: Iterable[int]) -> Rows:
        """Those rows, in that order; each keeps its place."""
        return Rows(self._tables, self._chosen[np.fromiter(rows, dtype=np.int64)])
