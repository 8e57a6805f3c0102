"""Data files as rows: parquet, JSON, JSONL (also gzipped), and data sets of the package `datasets`; rows as parquet.

org/name:train                a data set of the Hub and its split; org/name/CONFIG:train has a configuration
org/name:train[:1000]         a slice, as datasets.load_dataset takes it
stream:org/name:train[:1000]  the first rows of the split, read once into the cache of rows; no other row is read
parquet:data/part-*.parquet   files of a builder of the package: json, parquet, arrow, csv or text
saved/                        a folder of save_to_disk; saved/:train a split of it; `@` is another spelling of the colon
"""

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl.data.row_cache import key_of
from verl.data.tables import ROWS_READ, ArrowRow, ArrowTable, JsonTable, ParquetTable, Rows, Table, mapped_rows
from verl.errors import DataError, install_command
from verl.foreign_text import clean
from verl.models.content import digest_of_text
from verl.regular_files import require_regular, whole_file

Files = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
SUFFIXES = (".parquet", ".json", ".jsonl", ".json.gz", ".jsonl.gz")


def read_rows(files: Files) -> Rows:
    """The rows of all files, in order. A name is a file (.parquet, .json, .jsonl, .gz of the latter two) or a data set, see
    above. Raises DataError for a file that is missing, unreadable, empty or of an unknown kind."""
    names = [files] if isinstance(files, (str, os.PathLike)) else list(files)
    if not names:
        raise DataError("The list of data files is empty; set data.train_files and data.val_files.")
    return Rows([_open(os.path.expanduser(os.fspath(name))) for name in names])


def is_data_file(name: str | os.PathLike[str]) -> bool:
    """Whether `name`, perhaps a prompt, is a data file that exists, or a pattern of a builder."""
    text = os.path.expanduser(os.fspath(name))
    return text.endswith(SUFFIXES) and (os.path.exists(text) or names_builder(text))


def _open(name: str) -> Table:
    is_file = name.endswith(SUFFIXES) and not names_builder(name)
    if is_file or not name or (os.path.lexists(name) and not os.path.isdir(name)):
        fix = "Correct the path, or prepare the file with `verl data`."
        path = require_regular(name, "The data file", DataError, fix)
        if not path.name.endswith(SUFFIXES):
            convert = f" Name it csv:{path}:train, or let pandas write it as parquet." if path.suffix == ".csv" else ""
            raise DataError(f"The data file {path} is of an unknown kind; use one of {', '.join(SUFFIXES)}.{convert}")
        table: Table = ParquetTable(path) if path.name.endswith(".parquet") else JsonTable(path)
    else:
        table = open_data_set(name)
    if len(table) == 0:
        raise DataError(f"The data file {name} has no rows.")
    return table


def write_parquet(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write `path` completely or not at all, in its folder. Raises DataError for values that parquet cannot hold."""
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    fields = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [row.get(name) for row in rows] for name in fields}
    try:
        with whole_file(path) as temporary:
            pyarrow.parquet.write_table(pyarrow.table(columns), temporary, write_page_checksum=True)
    except (
        pyarrow.ArrowException,
        OverflowError,
        UnicodeError,
    ) as error:  # an object without fields, a column of several types
        raise DataError(f"{path} cannot be written as parquet: {clean(error)}. Write .jsonl instead.") from error


_SPLIT = r"\w[\w.-]*(?:\[[^\]]*\])?"
_BUILDER = r"(?:(?P<builder>json|parquet|arrow|csv|text):)?"
_NAME = re.compile(
    rf"(?P<stream>stream:)?{_BUILDER}(?P<path>.+?)(?:[:@](?P<split>{_SPLIT}(?:\+{_SPLIT})*))?", re.DOTALL
)
_FIRST_ROWS = re.compile(r"(?P<split>\w+)(?:\[:(?P<count>\d+)\])?")


def names_builder(name: str) -> bool:
    """Whether `name` chooses a builder of the package, or a stream, and is no file."""
    match = _NAME.fullmatch(name)
    return match is not None and bool(match["builder"] or match["stream"]) and not Path(name).exists()


def files_behind(name: str) -> list[Path]:
    """The local files that a name of `read_rows` leads to: those of a builder's pattern, and all of a folder; none for a data
    set of the Hub. Raises OSError."""
    match = _NAME.fullmatch(name)
    assert match is not None, "any text matches"
    if names_builder(name) and match["builder"]:
        from datasets.data_files import resolve_pattern

        return [] if "://" in match["path"] else [Path(file) for file in resolve_pattern(match["path"], os.getcwd())]
    path = Path(name).expanduser() if Path(name).expanduser().exists() else Path(match["path"]).expanduser()
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())


def open_data_set(name: str) -> Table:
    """The rows of a data set. Raises DataError for a data set that cannot be loaded, and for a split that it lacks."""
    match = _NAME.fullmatch(name)
    assert match is not None, "any text matches"
    path, split = (name, None) if Path(name).exists() else (match["path"], match["split"])
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{path} is not a file, and data sets need the package 'datasets'. Correct it, or install the package: "
            f"{install_command('datasets', 'datasets')}"
        ) from error
    datasets.disable_progress_bars()
    try:
        if match["builder"]:
            return _load(name, match["stream"], match["builder"], {"data_files": path}, split or "train")
        if not any((Path(path) / marker).is_file() for marker in ("dataset_dict.json", "state.json")):
            path, _, config = (path, "", "") if Path(path).exists() or path.count("/") < 2 else path.rpartition("/")
            return _load(name, match["stream"], path, {"name": config or None}, split)
        return _only_split(datasets.load_from_disk(path), path, split)
    except DataError:
        raise
    except Exception as error:
        # loading runs other people's code and network clients: they raise anything
        raise DataError(
            f"{name} is neither a file nor a data set that can be loaded: {type(error).__name__}: {clean(error)}"
        ) from error


def _load(name: str, stream: str | None, path: str, arguments: dict[str, object], split: str | None) -> Table:
    import datasets

    if not stream:
        return _only_split(
            datasets.load_dataset(path, split=split, **arguments), name, split, is_chosen=split is not None
        )
    first = _FIRST_ROWS.fullmatch(split or "")
    if first is None:
        raise DataError(f"The stream {name} needs a split: write {name.partition('@')[0]}:train, or ...:train[:1000].")
    builder = datasets.load_dataset_builder(path, **arguments)
    rows: Any = builder.as_streaming_dataset(split=first["split"])
    rows = rows.take(int(first["count"])) if first["count"] else rows
    features = rows.features or rows._resolve_features().features
    digest = digest_of_text(str(builder.dataset_name), builder.config_id, str(builder.hash), str(split))
    batches = _batches(rows.with_format("arrow"), features.arrow_schema)
    return ArrowTable(mapped_rows(key_of("stream", digest), features.arrow_schema, batches), f"data set {name}", digest)


def _batches(rows: Any, schema: Any) -> Iterator[object]:
    for batch in rows.iter(ROWS_READ):
        yield batch.select(schema.names).cast(schema)


def _only_split(loaded: object, path: str, split: str | None, *, is_chosen: bool = False) -> Table:
    """The table of the split. `is_chosen`: `loaded` is already that split."""
    import datasets

    if is_chosen or not isinstance(loaded, datasets.DatasetDict):
        return HuggingFaceTable(loaded, path)
    if not split and len(loaded) == 1:
        split = next(iter(loaded))
    if split not in loaded:
        fault = f"has no split {split!r}" if split else "has several splits"
        raise DataError(f"The data set {path} {fault}; write {path}:SPLIT with one of {', '.join(loaded)}.")
    return HuggingFaceTable(loaded[split], f"{path}:{split}")


class HuggingFaceTable(Table):
    """One split of a data set of the `datasets` package."""

    def __init__(self, dataset: Any, name: str):
        self.dataset, self.name = dataset, f"data set {name}"

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, rows: np.ndarray, fields: Collection[str] | None) -> list[dict[str, Any]]:
        try:
            columns = self.dataset[rows.tolist()]
        except Exception as error:  # as below
            raise DataError(f"The {self.name} holds a row that cannot be read: {clean(error)}") from error
        names = list(columns) if fields is None else [name for name in columns if name in fields]
        return [ArrowRow({name: columns[name][number] for name in names}) for number in range(len(rows))]

    def texts(self, field: str) -> set[str]:
        values = self.dataset.unique(field) if field in self.dataset.column_names else []
        return {value for value in values if isinstance(value, str)}

    def digest(self) -> str | None:
        return getattr(self.dataset, "_fingerprint", None)

    def __getitem__(self, row: int) -> dict[str, Any]:
        try:
            return ArrowRow(self.dataset[row])
        except Exception as error:
            # a data set decodes its columns by code of its author
            raise DataError(f"{self.place(row)} cannot be read: {type(error).__name__}: {clean(error)}") from error
