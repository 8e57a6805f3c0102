"""The ledger as an SQLite file: its tables, connections and checks, and its rewind to an earlier step.

about     run, base: the offset at which this file's history starts (0, unless the file was lost once), format
samples   one row per attempt at a sample, with the steps in which it was issued, scored and ended
segments  the tokens of a sample in the order in which they were added, and their source: policy or environment
skipped   prompts that never train, because the run went back to a checkpoint and continued behind them
steps     the offset at the end of every step, and the samples that had ended without training by then
lengths   mean response lengths of the prompts that ended in every step (verl/tracking/ledger/tracker.py)

Every change carries the number of its step and overwrites nothing that an earlier step wrote, so the file can be rewound to
the end of any step.

A commit of the file is ordered before a checkpoint. Rows are committed during the step without waiting for the disk: journal
WAL with synchronous=NORMAL: a kill loses no commit, and a power failure loses at most the last ones, never the file's
integrity. Before a checkpoint is renamed into its place, `LedgerWriter.flush` commits once more under synchronous=FULL: this
syncs all of the journal. So no checkpoint is ahead of the ledger, and a resumed run rewinds the records after its checkpoint.

The cost of a resume, of a checkpoint and of the counts does not grow with the history. What changes after a step is reached by
the index of `ended_step`, counts are sums per step, and a resume compares the newest _VERIFIED samples with the checkpoint. A
resume reads all `lengths`: a byte a sample.
"""

import json
import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache, partial
from pathlib import Path

from verl.errors import CheckpointError
from verl.foreign_text import clean
from verl.tracking.files import NETWORK_FILE_SYSTEMS, file_system_of
from verl.tracking.ledger.records import TRAINED, Offset, chained_digest, content_digest

log = logging.getLogger(__name__)

NAME = "ledger.sqlite"
FORMAT = 3
BUSY_S = 30.0  # longest wait for another process that reads or writes the file
_VERIFIED = 100_000  # newest samples that a resume compares with its checkpoint: about a second
_CHECKED_BYTES = 1 << 28  # larger files are not searched for damaged pages

_LENGTHS = "CREATE TABLE IF NOT EXISTS lengths (step INTEGER PRIMARY KEY, prompts BLOB);"  # earlier files have none
SCHEMA = (
    _LENGTHS
    + """
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE samples (
  ordinal INTEGER, sample INTEGER, attempt INTEGER, epoch INTEGER, data_row INTEGER, prompt TEXT,
  issued_step INTEGER NOT NULL, split TEXT, token_limit INTEGER,
  scored_step INTEGER, reward REAL, parts TEXT, error TEXT, digest TEXT,
  ended_step INTEGER, fate TEXT, uses INTEGER,
  PRIMARY KEY (ordinal, sample, attempt));
CREATE INDEX samples_ended ON samples (ended_step);
CREATE TABLE segments (
  ordinal INTEGER, sample INTEGER, attempt INTEGER, first_token INTEGER, step INTEGER NOT NULL, version INTEGER,
  tokens BLOB, log_probs BLOB, finish_reason TEXT, rank INTEGER, digest BLOB, source TEXT NOT NULL,
  PRIMARY KEY (ordinal, sample, attempt, first_token));
CREATE TABLE skipped (step INTEGER PRIMARY KEY, first_ordinal INTEGER, next_ordinal INTEGER);
CREATE INDEX samples_again ON samples (attempt) WHERE attempt = 1;
CREATE TABLE steps (step INTEGER PRIMARY KEY, cursor INTEGER, num_trained INTEGER, digest TEXT,
  dropped INTEGER, evicted INTEGER, defaulted INTEGER);
"""
)
_OFFSET = "step, cursor, num_trained, digest"  # columns of steps
STATEMENTS = {
    "issue": "INSERT INTO samples (ordinal, sample, attempt, epoch, data_row, prompt, issued_step, split, token_limit) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "generate": "INSERT INTO segments VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, content_digest(?7, ?8), ?11)",
    "score": "UPDATE samples SET scored_step = ?, reward = ?, parts = ?, error = ?, digest = ? "
    "WHERE ordinal = ? AND sample = ? AND attempt = ?",
    "end": "UPDATE samples SET ended_step = ?, fate = ?, uses = ? WHERE ordinal = ? AND sample = ? AND attempt = ?",
    "lengths": "INSERT INTO lengths VALUES (?, ?)",
    "skip": "INSERT OR REPLACE INTO skipped VALUES (?, ?, ?)",
    "step": "INSERT INTO steps SELECT ?1, ?2, ?3, ?4, coalesce(max(dropped), 0) + (SELECT count(*) {dropped}), "
    "coalesce(max(evicted), 0) + (SELECT count(*) {evicted}), coalesce(max(defaulted), 0) + (SELECT count(*) {defaulted}) "
    "FROM (SELECT * FROM steps ORDER BY step DESC LIMIT 1)".format(
        dropped="FROM samples WHERE ended_step = ?1 AND fate = 'dropped'",
        evicted="FROM samples WHERE ended_step = ?1 AND fate = 'evicted'",
        defaulted="FROM samples WHERE ended_step = ?1 AND error IS NOT NULL",
    ),
}
# a sample changes until it ends, so the index of ended_step reaches everything after a step
_REWIND = (
    _LENGTHS
    + """
DELETE FROM lengths WHERE step > {step};
DELETE FROM segments WHERE step > {step} AND (ordinal, sample, attempt) IN (
  SELECT ordinal, sample, attempt FROM samples WHERE ended_step IS NULL OR ended_step > {step});
DELETE FROM samples WHERE issued_step > {step} AND (ended_step IS NULL OR ended_step > {step});
UPDATE samples SET scored_step = NULL, reward = NULL, parts = NULL, error = NULL, digest = NULL
  WHERE scored_step > {step} AND (ended_step IS NULL OR ended_step > {step});
UPDATE samples SET ended_step = NULL, fate = NULL, uses = NULL WHERE ended_step > {step};
DELETE FROM skipped WHERE step > {step};
DELETE FROM steps WHERE step > {step};
"""
)
FIX = (
    "Move it to another place: the run then continues from the checkpoint's own record, without the history before it."
)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn errors of SQLite and the disk about the ledger `path` into CheckpointError."""
    try:
        yield
    except (sqlite3.Error, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        # a damaged file can raise any of these
        if isinstance(error, sqlite3.OperationalError) and "no such" not in str(error):
            raise CheckpointError(
                f"The sample ledger {path} cannot be used: {clean(error)}. Free some space or check the disk, and run the same "
                "command again."
            ) from error
        raise CheckpointError(f"The sample ledger {path} is damaged ({clean(error)}). {FIX}") from error


def connect(path: Path) -> sqlite3.Connection:
    """Open for writing, in autocommit. The journal mode is the best that the folder allows: WAL; without shared memory,
    TRUNCATE; without locks too, TRUNCATE without locking, since a run folder has one writer. Raises sqlite3.Error."""
    db = _connect_best(path)
    db.create_function("content_digest", 2, content_digest)
    return db


def _connect_best(path: Path) -> sqlite3.Connection:
    if not is_network_folder(path.parent):
        try:
            return _connect(path, "wal")
        except sqlite3.OperationalError as error:
            if any(word in str(error) for word in ("locked", "full")):  # another journal would not help
                raise
    log.info("The folder of %s has no shared memory for a WAL journal; one without it is used.", path)
    try:
        return _connect(path, "truncate")
    except sqlite3.OperationalError as error:
        if any(word in str(error) for word in ("is locked", "full")):
            raise
    return _connect(path, "truncate", "&vfs=unix-none")


def _connect(path: Path, journal: str, options: str = "") -> sqlite3.Connection:
    db = _open(path, f"mode=rwc{options}")
    try:
        (got,) = db.execute(f"PRAGMA journal_mode={journal}").fetchone()
        db.execute("BEGIN IMMEDIATE")
        db.execute("COMMIT")
        if got != journal:
            raise sqlite3.OperationalError(f"the journal {journal} is not available")
        # without WAL, a commit that is not on the disk could leave half of itself after a power failure
        db.execute(f"PRAGMA synchronous={'NORMAL' if journal == 'wal' else 'FULL'}")
    except BaseException:
        db.close()
        raise
    return db


def _open(path: Path, options: str) -> sqlite3.Connection:
    """A connection. Raises sqlite3.DatabaseError if another file lies in the place of the ledger or its journal, or if it has
    other tables than a ledger, or code: a view, a trigger, an index or a check that computes."""
    for part in ("", "-wal", "-shm", "-journal"):
        file = path.with_name(path.name + part)
        if os.path.lexists(file) and not file.is_file():  # a pipe would block
            raise sqlite3.DatabaseError(f"{file.name} is not a regular file")
    db = sqlite3.connect(f"{path.absolute().as_uri()}?{options}", uri=True, isolation_level=None, timeout=BUSY_S)
    try:
        db.text_factory = partial(str, encoding="utf-8", errors="replace")  # text of any history can be read
        db.execute("PRAGMA ignore_check_constraints=ON")  # the tables of a ledger have none
        expected = _forms()
        for name, form in _forms_of(db).items():
            if form != expected.get(name):
                raise sqlite3.DatabaseError(f"its {clean(name)} is not of a ledger")
    except BaseException:
        db.close()
        raise
    return db


def _forms_of(db: sqlite3.Connection) -> dict[str, list[str]]:
    """The columns of every table; of an index, a view or a trigger its definition."""
    entries = db.execute("SELECT name, type, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    columns = "SELECT name FROM pragma_table_xinfo(?)"
    return {
        name: [row[0] for row in db.execute(columns, (name,))] if kind == "table" else [sql]
        for name, kind, sql in entries
    }


@cache
def _forms() -> dict[str, list[str]]:
    """The form of each table and index of a ledger."""
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(SCHEMA)
        return _forms_of(db)


def connect_read_only(path: Path) -> sqlite3.Connection:
    """Open for reading, also while a run writes, and on a disk that is read-only. Raises sqlite3.Error."""
    beside = path.with_name(f"{path.name}-wal").exists()  # then a writer is there, or was killed
    for options in ("mode=ro",) if beside else ("mode=ro", "immutable=1"):
        try:
            return _open(path, options)
        except sqlite3.Error as error:
            failure = error
    raise failure


def is_network_folder(folder: Path) -> bool:
    """Whether several machines may share the file system of `folder`, or a user-space process serves it. The WAL index is
    memory that all readers map: this works on one machine only."""
    return file_system_of(folder).startswith((*NETWORK_FILE_SYSTEMS, "fuse"))


def create(path: Path, run: str, base: Offset) -> None:
    """Create a ledger of `run` that starts at `base`, and sync it."""
    with explained(path), closing(connect(path)) as db:
        db.execute("PRAGMA synchronous=FULL")
        db.executescript(f"BEGIN; {SCHEMA} COMMIT;")
        about = {"format": str(FORMAT), "run": run, "base": json.dumps(vars(base))}
        db.executemany("INSERT INTO about VALUES (?, ?)", about.items())


def run_of(path: Path) -> str:
    """The id of the run that owns the ledger `path`. Raises CheckpointError when it is damaged or of a newer format."""
    with explained(path), closing(connect_read_only(path)) as db:
        state = "ok"
        if path.stat().st_size <= _CHECKED_BYTES:
            (state,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if state != "ok":
            raise CheckpointError(f"The sample ledger {path} is damaged ({clean(state)}). {FIX}")
        about = dict(db.execute("SELECT name, value FROM about"))
        if int(about["format"]) > FORMAT:
            raise CheckpointError(
                f"The sample ledger {path} has format {about['format']}; this version reads formats up to {FORMAT}. {FIX}"
            )
        return str(about["run"])


def offset_at(db: sqlite3.Connection, step: int) -> Offset | None:
    """The offset at the end of `step`; None when the ledger does not reach it."""
    row = db.execute(f"SELECT {_OFFSET} FROM steps WHERE step = ?", (step,)).fetchone()
    if row is not None:
        return Offset(*row)
    base = base_of(db)
    return base if base.step == step else None


def newest_offset(db: sqlite3.Connection) -> Offset:
    """The end of the last step in the file."""
    row = db.execute(f"SELECT {_OFFSET} FROM steps ORDER BY step DESC LIMIT 1").fetchone()
    return base_of(db) if row is None else Offset(*row)


def base_of(db: sqlite3.Connection) -> Offset:
    """The offset at the start of the history of the file."""
    return Offset(**json.loads(db.execute("SELECT value FROM about WHERE name = 'base'").fetchone()[0]))


def holds(path: Path, offset: Offset, num_verified: int = _VERIFIED) -> bool:
    """Whether the ledger, rewound to the step of `offset`, matches the offset. Its newest steps are compared sample by sample,
    so many steps that they have at least `num_verified` samples."""
    with explained(path), closing(connect_read_only(path)) as db:
        if offset_at(db, offset.step) != offset:
            return False
        start = db.execute(
            f"SELECT {_OFFSET} FROM steps WHERE step <= ? AND num_trained <= ? ORDER BY step DESC LIMIT 1",
            (offset.step, offset.num_trained - num_verified),
        ).fetchone()
        before = base_of(db) if start is None else Offset(*start)
        digest, num_trained = before.digest, before.num_trained
        between = (before.step, offset.step)
        for (step,) in db.execute("SELECT step FROM steps WHERE step > ? AND step <= ? ORDER BY step", between):
            trained = db.execute(
                "SELECT ordinal, sample, uses, digest FROM samples WHERE ended_step = ? AND fate = ? "
                "AND max(issued_step, scored_step) <= ended_step ORDER BY ordinal, sample", (step, TRAINED),
            ).fetchall()  # fmt: skip
            number, digest = chained_digest(digest, step, trained)
            num_trained += number
        first = -(1 << 62) if start is None else before.step  # a changed file may name any step
        (counted,) = db.execute(
            "SELECT count(*) FROM samples WHERE fate = ? AND (ended_step IS NULL OR ended_step > ? AND ended_step <= ?)",
            (TRAINED, first, offset.step),
        ).fetchone()
        return (digest, num_trained, counted) == (offset.digest, offset.num_trained, num_trained - before.num_trained)


def rewind(path: Path, step: int) -> None:
    """Delete everything after the end of `step`, and sync."""
    with explained(path), closing(connect(path)) as db:
        db.execute("PRAGMA synchronous=FULL")
        db.executescript(f"BEGIN; {_REWIND.format(step=int(step))} COMMIT;")


def copy(source: Path, target: Path) -> None:
    """Copy the ledger `source`, perhaps in use, to `target`."""
    with explained(source), closing(connect_read_only(source)) as old:
        back_up(old, target)


def back_up(db: sqlite3.Connection, target: Path) -> None:
    """Copy the open ledger `db` to the file `target`. Raises sqlite3.Error."""
    with closing(connect(target)) as new:
        db.backup(new)


def write_open(path: Path, target: Path, offset: Offset) -> None:
    """Write a ledger to the new file `target` that starts at `offset`, with the samples that are open there in the ledger
    `path`. A checkpoint keeps it, so that it can be used without its run folder."""
    create(target, run_of(path), offset)
    step = int(offset.step)
    with explained(target), closing(connect(target)) as db:
        db.execute("ATTACH ? AS whole", (str(path),))
        db.execute("BEGIN")
        db.execute(
            "INSERT INTO samples SELECT * FROM whole.samples "
            f"WHERE issued_step <= {step} AND (ended_step IS NULL OR ended_step > {step})"
        )
        db.execute(
            "INSERT INTO segments SELECT s.* FROM samples CROSS JOIN whole.segments s USING (ordinal, sample, attempt)"
        )
        db.execute("INSERT INTO lengths SELECT * FROM whole.lengths")
        db.execute("COMMIT")
        db.executescript(f"BEGIN; {_REWIND.format(step=step)} COMMIT;")
        db.execute("DETACH whole")
        db.execute("PRAGMA journal_mode=DELETE")  # readable on a read-only disk
