"""The index of all samples of a run: an SQLite file in the user's cache, with their texts, built from the samples files.

The run folder is not written to. A file of samples is indexed once, newest first. A file that a resumed run replaces is
indexed again, and the rows of a file that is gone leave the index.
"""

import fcntl
import json
import logging
import os
import re
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TypeAlias, cast

from verl.page.summaries import (
    PackedTexts,
    SampleSummary,
    fold,
    hash_of,
    last_message,
    owners_with,
    pack_texts,
    score_statistics,
    summary_of,
    without_arrays,
)
from verl.regular_files import cache_folder, open_regular
from verl.tracking.files import Row

log = logging.getLogger(__name__)

FORMAT = "3"
_FILE = re.compile(r"step_(\d{6,15})\.jsonl")
_BATCH = 500  # rows between two commits, so that a reader sees a large file grow
_SHOWN = 400  # characters of prompt and response in a list
MAX_LINE_BYTES = 64 << 20
_SHOWN_FILES = 20_000  # of more files, curves show evenly spaced ones
_MANY_FILES = 50_000
_NEWEST_STEPS = 1000  # shown one by one, and looked at for replaced files: a resume replaces the newest

_COLUMNS = [name for name in SampleSummary._fields if name not in ("prompt", "response")]
_SCHEMA = f"""
CREATE TABLE files (id INTEGER PRIMARY KEY, split TEXT, step INTEGER, stamp TEXT, complete INTEGER, rows INTEGER,
  damaged INTEGER, mean REAL, low REAL, high REAL, group_spread REAL, without_signal REAL);
CREATE UNIQUE INDEX files_newest ON files (step DESC, split);
CREATE TABLE samples (id INTEGER PRIMARY KEY, file INTEGER, line INTEGER, start INTEGER, size INTEGER, prompt_hash TEXT,
  {", ".join(_COLUMNS)});
CREATE INDEX samples_file ON samples (file, unit, answer, score);
CREATE INDEX samples_line ON samples (file, line);
CREATE INDEX samples_ordinal ON samples (ordinal, sample);
CREATE INDEX samples_prompt ON samples (prompt_hash);
CREATE TABLE shown (id INTEGER PRIMARY KEY, prompt TEXT, response TEXT);
CREATE TABLE texts (id INTEGER PRIMARY KEY, file INTEGER, owners BLOB, ends BLOB, folded BLOB);
CREATE INDEX texts_file ON texts (file);
PRAGMA user_version = {FORMAT};
"""
# what the last update has listed: the number of samples files of a split, and the newest step
_LISTED = "CREATE TABLE IF NOT EXISTS listed (split TEXT PRIMARY KEY, num INTEGER, newest INTEGER)"
_INSERT = (
    f"INSERT INTO samples (id, file, line, start, size, prompt_hash, {', '.join(_COLUMNS)}) "
    f"VALUES ({', '.join('?' * (6 + len(_COLUMNS)))})"
)
_SCORES = "SELECT unit, score FROM samples WHERE file = ? AND score IS NOT NULL"
IndexedSample: TypeAlias = sqlite3.Row | Row  # the columns of a sample, in the index or read from its file
_Line = tuple[int, int, int, SampleSummary]  # line, its first byte, its bytes, its summary


def index_folder() -> Path:
    """The folder of index files: VERL_PAGE_CACHE, else `verl/page` in the user's cache, else a temporary one."""
    with suppress(OSError):
        folder = cache_folder("VERL_PAGE_CACHE", "page")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    return Path(tempfile.mkdtemp(prefix="verl-page-"))


class SampleIndex:
    """The index of the run in `folder`. `update` brings it up to date; the other methods read it, from any thread."""

    def __init__(self, folder: Path, cache: Path | None = None):
        self.samples = folder / "samples"
        self._writing_here = threading.Lock()
        self._local = threading.local()
        name = f"{folder.name[:60]}-{hash_of(str(folder.resolve()))}.sqlite"
        self.path = (cache or index_folder()) / name
        try:
            self._create()
        except sqlite3.Error:  # damaged, or of another version: it can be built again
            with suppress(OSError):
                for part in ("", "-wal", "-shm"):
                    self.path.with_name(name + part).unlink(missing_ok=True)
            try:
                self._create()
            except sqlite3.Error:  # a full disk, or a folder in its place
                self.path = Path(tempfile.mkdtemp(prefix="verl-page-")) / name
                self._create()

    def _create(self) -> None:
        with closing(self._connect()) as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version == 0:
                db.execute("PRAGMA journal_mode=WAL")
                db.executescript(_SCHEMA)
            elif str(version) != FORMAT:
                raise sqlite3.DatabaseError(f"format {version}")
            db.execute(_LISTED)

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, isolation_level=None, timeout=30)
        db.execute("PRAGMA synchronous=OFF")
        db.row_factory = sqlite3.Row
        return db

    @property
    def db(self) -> sqlite3.Connection:
        """This thread's connection."""
        if not hasattr(self._local, "db"):
            self._local.db = self._connect()
        return cast("sqlite3.Connection", self._local.db)

    def rows(self, query: str, *values: object) -> list[sqlite3.Row]:
        return self.db.execute(query, values).fetchall()

    # -- files -----------------------------------------------------------------------------------------------------------

    def files(self) -> dict[tuple[str, int], Path]:
        """(split, step) -> file, of all samples files in the folder."""
        return self.files_of(self.samples.parent)

    @staticmethod
    def files_of(folder: Path) -> dict[tuple[str, int], Path]:
        """(split, step) -> file, of all samples files in a run folder."""
        files = {}
        with suppress(OSError):
            for split in os.scandir(folder / "samples"):
                if split.is_dir(follow_symlinks=False):
                    for entry in os.scandir(split.path):
                        if match := _FILE.fullmatch(entry.name):
                            files[split.name, int(match.group(1))] = Path(entry.path)
        return files

    def splits(self) -> list[str]:
        """The splits that have a folder of samples."""
        with suppress(OSError), os.scandir(self.samples) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        return []

    def steps(self, split: str) -> list[int]:
        """The steps of a split that have a samples file, in no order."""
        with suppress(OSError):
            if split in self.splits():
                return [
                    int(match.group(1)) for match in map(_FILE.fullmatch, os.listdir(self.samples / split)) if match
                ]
        return []

    def listing(self) -> dict[str, tuple[int, int]]:
        """split -> (number of its samples files, newest step). A folder of very many files is as the last update has listed
        it: to list a million takes a second."""
        listed = {row["split"]: row for row in self.rows("SELECT * FROM listed")}
        listing = {}
        for split in self.splits():
            if (row := listed.get(split)) is not None and row["num"] > _MANY_FILES:
                listing[split] = (row["num"], row["newest"])
            elif steps := self.steps(split):
                listing[split] = (len(steps), max(steps))
        return listing

    def num_unread(self, listing: Mapping[str, tuple[int, int]] | None = None) -> int:
        """Samples files of the folder, or of its `listing`, that are not indexed yet."""
        (done,) = self.rows("SELECT count(*) FROM files WHERE complete = 1")[0]
        return max(sum(num for num, _ in (listing or self.listing()).values()) - int(done), 0)

    def file(self, split: str, step: int) -> Path | None:
        """The samples file of a step."""
        path = self.samples / split / f"step_{step:06d}.jsonl"
        return path if split in self.splits() and os.path.lexists(path) else None

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """This thread's connection, while no other thread or process writes: a run's page and `verl view` share the file."""
        with self._writing_here, self.path.with_suffix(".lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield self.db

    def update(self, only: tuple[str, int] | None = None, deadline: Callable[[], bool] | None = None) -> bool:
        """Index files that are new or were replaced: all of them, the newest first, or `only` one. Stops early when
        `deadline()` is true. Returns whether anything changed."""
        files = self.files()
        indexed = {
            (row["split"], row["step"]): row for row in self.rows("SELECT id, split, step, stamp, complete FROM files")
        }
        changed, num_unchanged = False, 0
        for key in indexed.keys() - files.keys():
            with self._writing() as db:
                self._forget(db, indexed[key]["id"])
            changed = True
        to_read = [only] if only in files else sorted(files, key=lambda key: -key[1]) if only is None else []
        for key in to_read:
            if deadline is not None and deadline():
                break
            row = indexed.get(key)
            if row is not None and row["complete"]:
                if num_unchanged >= _NEWEST_STEPS or row["stamp"] == _stamp(files[key]):
                    num_unchanged += 1
                    continue
            with self._writing() as db, suppress(OSError):
                changed |= self._index(db, key, files[key])
        else:
            if only is None:
                self._note_listed(files)
        return changed

    def _note_listed(self, files: Iterable[tuple[str, int]]) -> None:
        steps: dict[str, list[int]] = {}
        for split, step in files:
            steps.setdefault(split, []).append(step)
        rows = [(split, len(numbers), max(numbers)) for split, numbers in steps.items()]
        with self._writing() as db:
            db.executemany("INSERT OR REPLACE INTO listed VALUES (?, ?, ?)", rows)

    def _forget(self, db: sqlite3.Connection, file: int) -> None:
        db.execute("BEGIN")
        db.execute("DELETE FROM texts WHERE file = ?", (file,))
        db.execute("DELETE FROM shown WHERE id IN (SELECT id FROM samples WHERE file = ?)", (file,))
        db.execute("DELETE FROM samples WHERE file = ?", (file,))
        db.execute("DELETE FROM files WHERE id = ?", (file,))
        db.execute("COMMIT")

    def _index(self, db: sqlite3.Connection, key: tuple[str, int], path: Path) -> bool:
        stamp, (split, step) = _stamp(path), key
        old = db.execute("SELECT * FROM files WHERE split = ? AND step = ?", key).fetchone()
        if old is not None:
            if old["complete"] and old["stamp"] == stamp:
                return False  # another thread or process was faster
            self._forget(db, old["id"])
        file = db.execute(
            "INSERT INTO files (split, step, stamp, complete, rows, damaged) VALUES (?, ?, ?, 0, 0, 0)",
            (split, step, stamp),
        ).lastrowid
        assert file is not None
        num_rows = num_damaged = 0
        batch: list[_Line] = []
        for line, start, content in _lines(path):
            row = parsed_row(without_arrays(content)) or parsed_row(content)
            if row is None:
                num_damaged += 1
                continue
            batch.append((line, start, len(content), summary_of(row, line)))
            if len(batch) == _BATCH:
                num_rows += _insert(db, file, batch)
                batch = []
        num_rows += _insert(db, file, batch)
        db.execute(
            "UPDATE files SET complete = 1, rows = ?, damaged = ?, mean = ?, low = ?, high = ?, group_spread = ?, "
            "without_signal = ? WHERE id = ?", (num_rows, num_damaged, *score_statistics(db.execute(_SCORES, (file,))), file),
        )  # fmt: skip
        return True

    def containing(self, text: str) -> Iterator[set[int]]:
        """The ids of the samples with `text` in prompt or response, in any case of letters: one samples file at a time, the
        newest first."""
        needle = fold(text)
        for file in self.rows("SELECT id FROM files ORDER BY step DESC, split"):
            ids: set[int] = set()
            for row in self.db.execute("SELECT owners, ends, folded FROM texts WHERE file = ?", (file["id"],)):
                ids.update(owners_with(needle, PackedTexts(*row)))
            if ids:
                yield ids

    # -- samples -----------------------------------------------------------------------------------------------------------

    def row(self, split: str, step: int, line: int) -> Row | None:
        """The full row in line `line` (from 0) of a samples file; None when there is none."""
        path = self.file(split, step)
        if path is None:
            return None
        places = self.rows(
            "SELECT start, size FROM samples JOIN files ON files.id = file WHERE split = ? AND step = ? AND line = ? "
            "AND stamp = ?", split, step, line, _stamp(path),
        )  # fmt: skip
        if places:
            return self.read(path, places[0]["start"], places[0]["size"])
        with suppress(OSError):
            for number, _, content in _lines(path):
                if number == line:
                    return parsed_row(content)
        return None

    @staticmethod
    def read(path: Path | None, start: int, size: int) -> Row | None:
        """The row of `size` bytes at `start` of a samples file; None when there is none."""
        with suppress(OSError):
            if path is not None:
                with os.fdopen(open_regular(path), "rb") as stream:
                    stream.seek(start)
                    return parsed_row(stream.read(size))
        return None

    def is_complete(self, split: str, step: int) -> bool:
        """Whether the file of a step is indexed to its end."""
        return bool(self.rows("SELECT 1 FROM files WHERE split = ? AND step = ? AND complete = 1", split, step))

    def head(self, split: str, step: int, count: int) -> list[Row]:
        """The columns of the first `count` samples of a file, read from it."""
        path, samples = self.file(split, step), []
        with suppress(OSError):
            for line, _, content in _lines(path) if path is not None else ():
                row = parsed_row(content)
                if row is not None:
                    samples.append({"line": line, **summary_of(row, line)._asdict()})
                if line + 1 >= count:
                    break
        return samples

    def summary(self, split: str, step: int, line: int) -> IndexedSample | None:
        """The columns of one sample; None when the file has no such row."""
        rows = self.rows(
            "SELECT samples.* FROM samples JOIN files ON files.id = file WHERE split = ? AND step = ? AND line = ?",
            split, step, line,
        )  # fmt: skip
        if rows:
            return rows[0]
        row = self.row(split, step, line)
        return None if row is None else {"line": line, **summary_of(row, line)._asdict()}

    def statistics(self) -> dict[str, list[sqlite3.Row]]:
        """split -> the rows of its indexed files, by step; of many files evenly spaced ones and the newest."""
        state = (
            *self.rows("PRAGMA data_version")[0],
            self.db.total_changes,
        )  # changes of other connections, and of this one
        cached: tuple[object, dict[str, list[sqlite3.Row]]] = getattr(self._local, "statistics", (None, {}))
        if cached[0] == state:
            return cached[1]
        by_split: dict[str, list[sqlite3.Row]] = {}
        num, newest = self.rows("SELECT count(*), max(step) FROM files")[0]
        every = 1 + num // _SHOWN_FILES
        query = "SELECT * FROM files WHERE step % ? = 0 OR step > ? ORDER BY split, step"
        for row in self.rows(query, every, (newest or 0) - _NEWEST_STEPS):
            by_split.setdefault(row["split"], []).append(row)
        self._local.statistics = (state, by_split)
        return by_split


def _insert(db: sqlite3.Connection, file: int, batch: Sequence[_Line]) -> int:
    """Insert some rows of a file; their number."""
    db.execute("BEGIN IMMEDIATE")
    first = 1 + (db.execute("SELECT max(id) FROM samples").fetchone()[0] or 0)
    # prompt -> its hash and what lists show of it; the samples of a group share it
    ends: dict[str, tuple[str, str]] = {}
    rows, displayed = [], []
    for number, (line, start, size, summary) in enumerate(batch, first):
        if summary.prompt not in ends:
            ends[summary.prompt] = (hash_of(summary.prompt), last_message(summary.prompt[-1500:])[:_SHOWN])
        prompt_hash, prompt = ends[summary.prompt]
        rows.append((number, file, line, start, size, prompt_hash, *summary[: len(_COLUMNS)]))
        displayed.append((number, prompt, summary.response[:_SHOWN]))
    db.executemany(_INSERT, rows)
    db.executemany("INSERT INTO shown VALUES (?, ?, ?)", displayed)
    for which in ("prompt", "response"):
        packed = pack_texts((number, getattr(summary, which)) for number, (*_, summary) in enumerate(batch, first))
        db.execute("INSERT INTO texts (file, owners, ends, folded) VALUES (?, ?, ?, ?)", (file, *packed))
    db.execute("UPDATE files SET rows = rows + ? WHERE id = ?", (len(batch), file))
    db.execute("COMMIT")
    return len(batch)


def _stamp(path: Path) -> str:
    status = path.stat()
    return f"{status.st_mtime_ns}-{status.st_size}-{status.st_ino}"


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """(line, its first byte, content) of each line; a line that is too long to be a row is cut."""
    with os.fdopen(open_regular(path), "rb") as stream:
        line, start = 0, 0
        while content := stream.readline(MAX_LINE_BYTES):
            yield line, start, content
            line, start = line + 1, start + len(content)


def parsed_row(content: bytes | str) -> dict[str, object] | None:
    """The row in a line of a samples file; None if there is none."""
    try:
        row = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
