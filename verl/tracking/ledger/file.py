"""The ledger as an SQLite file: its tables, and how it is opened, checked and taken back to an earlier step.

about     run, base: the offset from which this file has the history (0, unless the file was lost once)
samples   a row for every attempt at a sample, with the steps in which it was issued, scored and ended
pieces    the tokens of a sample, as they were added
passed    prompts that never train, because the run went back to a checkpoint and on behind them
steps     the offset at the end of every step

Whatever happens carries the number of its step and overwrites nothing that an earlier step wrote, so that the file can be taken
back to the end of any step: what came later has then not happened.

Why a commit of the file is ordered before a checkpoint: rows are committed while the step goes on, without waiting for the
disk (journal WAL, synchronous=NORMAL: a kill loses nothing that was committed, a power failure at most the last commits, never
the file's integrity). Before a checkpoint is renamed into its place, `LedgerWriter.flush` commits once more under
synchronous=FULL, which puts the whole journal on the disk. So a checkpoint that exists never knows more than the ledger, and
what the ledger knows beyond the newest checkpoint is taken back when the run goes on.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil

from verl.errors import CheckpointError
from verl.tracking.ledger.book import TRAINED, Offset

log = logging.getLogger(__name__)

NAME = "ledger.sqlite"
FORMAT = 1
BUSY_S = 30.0  # longest wait for another process that reads or writes the file

SCHEMA = """
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE samples (
  ordinal INTEGER, sample INTEGER, attempt INTEGER, epoch INTEGER, data_row INTEGER, prompt TEXT,
  issued_step INTEGER NOT NULL, split TEXT, token_limit INTEGER,
  scored_step INTEGER, reward REAL, parts TEXT, error TEXT, digest TEXT,
  ended_step INTEGER, fate TEXT, uses INTEGER,
  PRIMARY KEY (ordinal, sample, attempt));
CREATE INDEX samples_ended ON samples (ended_step);
CREATE TABLE pieces (
  ordinal INTEGER, sample INTEGER, attempt INTEGER, first_token INTEGER, step INTEGER NOT NULL, version INTEGER,
  tokens BLOB, log_probs BLOB, finish_reason TEXT, rank INTEGER, digest BLOB,
  PRIMARY KEY (ordinal, sample, attempt, first_token));
CREATE TABLE passed (step INTEGER PRIMARY KEY, first_ordinal INTEGER, next_ordinal INTEGER);
CREATE TABLE steps (step INTEGER PRIMARY KEY, cursor INTEGER, num_trained INTEGER, digest TEXT);
"""
STATEMENTS = {
    "issue": "INSERT INTO samples (ordinal, sample, attempt, epoch, data_row, prompt, issued_step, split, token_limit) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "generate": "INSERT INTO pieces VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "score": "UPDATE samples SET scored_step = ?, reward = ?, parts = ?, error = ?, digest = ? "
    "WHERE ordinal = ? AND sample = ? AND attempt = ?",
    "end": "UPDATE samples SET ended_step = ?, fate = ?, uses = ? WHERE ordinal = ? AND sample = ? AND attempt = ?",
    "pass": "INSERT OR REPLACE INTO passed VALUES (?, ?, ?)",
    "step": "INSERT INTO steps VALUES (?, ?, ?, ?)",
}
_TAKE_BACK = """
DELETE FROM pieces WHERE step > {step};
DELETE FROM samples WHERE issued_step > {step};
UPDATE samples SET scored_step = NULL, reward = NULL, parts = NULL, error = NULL, digest = NULL WHERE scored_step > {step};
UPDATE samples SET ended_step = NULL, fate = NULL, uses = NULL WHERE ended_step > {step};
DELETE FROM passed WHERE step > {step};
DELETE FROM steps WHERE step > {step};
"""
# WAL keeps an index in memory that all readers map, which holds only on one machine
_NETWORK = ("nfs", "cifs", "smb", "9p", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs", "fuse")
FIX = "Move it to another place: the run then goes on from the checkpoint's own record, without the history before it."


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Raises CheckpointError for what SQLite or the disk says about the ledger `path`."""
    try:
        yield
    except (sqlite3.Error, ValueError, KeyError, TypeError) as error:  # whatever a damaged file may turn into
        if isinstance(error, sqlite3.OperationalError) and "no such" not in str(error):
            raise CheckpointError(
                f"The sample ledger {path} cannot be used: {error}. Free some space or check the disk, and run the same "
                "command again."
            ) from error
        raise CheckpointError(f"The sample ledger {path} is damaged ({error}). {FIX}") from error


def connect(path: Path) -> sqlite3.Connection:
    """Open for writing, in autocommit, with the best journal that the folder allows: WAL; where that is impossible, one that
    needs no shared memory; where the folder has no locks either, without them, since a run folder has one writer. Raises
    sqlite3.Error."""
    if not is_network_folder(path.parent):
        try:
            return _connect(path, "wal")
        except sqlite3.OperationalError as error:
            if any(word in str(error) for word in ("locked", "full")):  # another journal would not help
                raise
    log.info("The folder of %s has no shared memory for a journal of the kind WAL; one without it is used.", path)
    try:
        return _connect(path, "truncate")
    except sqlite3.OperationalError as error:
        if any(word in str(error) for word in ("is locked", "full")):
            raise
    return _connect(path, "truncate", "&vfs=unix-none")


def _connect(path: Path, journal: str, options: str = "") -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode=rwc{options}"
    db = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=BUSY_S)
    try:
        (got,) = db.execute(f"PRAGMA journal_mode={journal}").fetchone()
        db.execute("BEGIN IMMEDIATE")
        db.execute("COMMIT")
        if got != journal:
            raise sqlite3.OperationalError(f"the journal {journal} is not to be had")
        # without WAL, a commit that is not on the disk could leave half of itself after a power failure
        db.execute(f"PRAGMA synchronous={'NORMAL' if journal == 'wal' else 'FULL'}")
    except BaseException:
        db.close()
        raise
    return db


def connect_read_only(path: Path) -> sqlite3.Connection:
    """Open for reading, beside a run that writes or where nothing can be written. Raises sqlite3.Error."""
    beside = path.with_name(f"{path.name}-wal").exists()  # then a writer is there, or was killed
    for options in ("mode=ro",) if beside else ("mode=ro", "immutable=1"):
        db = sqlite3.connect(f"{path.absolute().as_uri()}?{options}", uri=True, isolation_level=None, timeout=BUSY_S)
        try:
            db.execute("SELECT count(*) FROM sqlite_master").fetchone()
            return db
        except sqlite3.Error as error:
            db.close()
            failure = error
    raise failure


def is_network_folder(folder: Path) -> bool:
    """Whether the mounted file system that holds `folder` is one of several machines, or is a program's."""
    where = folder.resolve()
    above = [mount for mount in psutil.disk_partitions(all=True) if where.is_relative_to(mount.mountpoint)]
    nearest = max(above, key=lambda mount: len(mount.mountpoint), default=None)
    return nearest is not None and nearest.fstype.startswith(_NETWORK)


def create(path: Path, run: str, base: Offset) -> None:
    """A new ledger of `run` that begins at `base`, on the disk when this returns."""
    with explained(path), closing(connect(path)) as db:
        db.execute("PRAGMA synchronous=FULL")
        db.executescript(f"BEGIN; {SCHEMA} COMMIT;")
        about = {"format": str(FORMAT), "run": run, "base": json.dumps(vars(base))}
        db.executemany("INSERT INTO about VALUES (?, ?)", about.items())


def run_of(path: Path) -> str:
    """Name of the run whose ledger `path` is. Raises CheckpointError when it is damaged or of another format."""
    with explained(path), closing(connect_read_only(path)) as db:
        (state,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if state != "ok":
            raise CheckpointError(f"The sample ledger {path} is damaged ({state}). {FIX}")
        about = dict(db.execute("SELECT name, value FROM about"))
        if about["format"] != str(FORMAT):
            raise CheckpointError(
                f"The sample ledger {path} is of format {about['format']}; this version reads format {FORMAT}. {FIX}"
            )
        return about["run"]


def offset_at(db: sqlite3.Connection, step: int) -> Offset | None:
    """The offset at the end of `step`; None when the ledger does not reach it."""
    row = db.execute("SELECT step, cursor, num_trained, digest FROM steps WHERE step = ?", (step,)).fetchone()
    if row is not None:
        return Offset(*row)
    base = base_of(db)
    return base if base.step == step else None


def newest_offset(db: sqlite3.Connection) -> Offset:
    """The end of the last step in the file."""
    row = db.execute("SELECT step, cursor, num_trained, digest FROM steps ORDER BY step DESC LIMIT 1").fetchone()
    return base_of(db) if row is None else Offset(*row)


def base_of(db: sqlite3.Connection) -> Offset:
    """Where the history of the file begins."""
    return Offset(**json.loads(db.execute("SELECT value FROM about WHERE name = 'base'").fetchone()[0]))


def holds(path: Path, offset: Offset) -> bool:
    """Whether the ledger, taken back to the step of `offset`, is the one that the offset describes."""
    with explained(path), closing(connect_read_only(path)) as db:
        if offset_at(db, offset.step) != offset:
            return False
        counted = db.execute(
            "SELECT count(*), count(digest) FROM samples WHERE fate = ? AND ended_step <= ?", (TRAINED, offset.step)
        ).fetchone()
        expected = offset.num_trained - base_of(db).num_trained
        return counted == (expected, expected)


def take_back(path: Path, step: int) -> None:
    """What came after the end of `step` has not happened; on the disk when this returns."""
    with explained(path), closing(connect(path)) as db:
        db.execute("PRAGMA synchronous=FULL")
        db.executescript(f"BEGIN; {_TAKE_BACK.format(step=int(step))} COMMIT;")


def copy(source: Path, target: Path) -> None:
    """`target` becomes a copy of the ledger `source`, which may be in use and is not changed."""
    with explained(source), closing(connect_read_only(source)) as old, closing(connect(target)) as new:
        old.backup(new)


def write_open(path: Path, target: Path, offset: Offset) -> None:
    """A ledger in the new file `target` that begins at `offset` and has the samples of the ledger `path` that are open there:
    what a checkpoint takes along, in case that it is ever used without the rest."""
    create(target, run_of(path), offset)
    step = int(offset.step)
    with explained(target), closing(connect(target)) as db:
        db.execute("ATTACH ? AS whole", (str(path),))
        db.execute("BEGIN")
        db.execute(
            "INSERT INTO samples SELECT * FROM whole.samples "
            f"WHERE issued_step <= {step} AND (ended_step IS NULL OR ended_step > {step})"
        )
        db.execute("INSERT INTO pieces SELECT p.* FROM whole.pieces p JOIN samples USING (ordinal, sample, attempt)")
        db.execute("COMMIT")
        db.executescript(f"BEGIN; {_TAKE_BACK.format(step=step)} COMMIT;")
        db.execute("DETACH whole")
        db.execute("PRAGMA journal_mode=DELETE")  # can be read where nothing can be written
