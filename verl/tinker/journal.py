"""The journal: requests that the service has accepted, and their answers, in an SQLite file that survives a kill.

about      the base model that the folder belongs to: its content, and all paths and names that it had; the content of
           further base models
sessions   sessions that have not ended, with their tenant
samplers   sampling sessions, with the digest of their weights
requests   a request in the order of acceptance, its body while it may have to run again, and its answer

Changes are gathered in memory and written by `flush`, all in one transaction, before an answer leaves. The next start
repeats the requests with an effect that no saved state of their model has; a request with an answer retains it.
"""

import hashlib
import itertools
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl.errors import CheckpointError
from verl.regular_files import make_folder
from verl.tinker.records import RefusedRequest

log = logging.getLogger(__name__)

NAME = "journal.sqlite"
REFUSED = "refused"  # in place of its route: a request of a model that never runs, though its number is used
COVERED = "covered"  # a request of a model; a saved state has its effect
BUSY_S = 20.0  # wait for another service in the folder: it may be about to end
_SCHEMA = """
CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS sessions (session TEXT PRIMARY KEY, tenant TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS samplers (sampler TEXT PRIMARY KEY, session TEXT NOT NULL, base TEXT NOT NULL,
  digest TEXT, path TEXT);
CREATE TABLE IF NOT EXISTS requests (number INTEGER PRIMARY KEY, request TEXT UNIQUE NOT NULL, session TEXT NOT NULL,
  owner TEXT NOT NULL, seq INTEGER NOT NULL, route TEXT NOT NULL, tenant TEXT NOT NULL, hash TEXT NOT NULL, body BLOB,
  answer BLOB, media TEXT, done REAL);
CREATE INDEX IF NOT EXISTS requests_owner ON requests (owner, seq);
"""


_LOST = "sessions and unsaved models that it had are gone. Saved checkpoints are still there."
_OF_VALUES = (sqlite3.DataError, sqlite3.IntegrityError, sqlite3.InterfaceError, sqlite3.ProgrammingError)
_WAL_HEADER, _FRAME_HEADER = 32, 24  # bytes, see the file format of SQLite
_WAL_MAGIC = (0x377F0682, 0x377F0683)


@dataclass(frozen=True)
class AcceptedRequest:
    """A request of a model or a sampler, its `owner`. Its `body` is None if it need not run again."""

    request_id: str
    session_id: str
    owner: str
    seq_id: int
    route: str
    tenant: str
    digest: str
    body: bytes | None
    answer: bytes | None = None
    media_type: str | None = None


class RequestJournal:
    """The journal in `folder`, of a service of the models `bases`; `aliases` has their earlier paths. Methods are called from
    any thread; nothing is on the disk before `flush`. Raises CheckpointError for a folder that is in use, and for another
    model's."""

    def __init__(self, folder: Path, *bases: str):
        make_folder(folder)
        self.path = folder / NAME
        is_new, num_frames = not self.path.exists(), _committed_frames(self.path.with_name(f"{NAME}-wal"))
        if is_new and any(folder.glob("models/*/model.json")):
            log.warning("%s is missing, though models are here: %s", self.path, _LOST)
        self._pending: list[tuple[str, tuple[object, ...]]] = []
        self._lists, self._disk = threading.Lock(), threading.Lock()
        try:
            self._file = sqlite3.connect(self.path, timeout=BUSY_S, check_same_thread=False, isolation_level=None)
            self._file.executescript("PRAGMA locking_mode=EXCLUSIVE; PRAGMA journal_mode=WAL;")
            (_, num_read, _) = self._file.execute("PRAGMA wal_checkpoint").fetchone()
            if num_frames is None or num_read < num_frames:
                log.warning("%s-wal is damaged, so its newest entries are lost: %s", self.path, _LOST)
            self._file.executescript(
                f"PRAGMA locking_mode=EXCLUSIVE; PRAGMA journal_mode=WAL; BEGIN; {_SCHEMA} COMMIT;"
            )
            self._file.execute("PRAGMA synchronous=FULL")
            self.path.chmod(0o600)  # it has the data of all tenants
            self._file.execute("INSERT OR IGNORE INTO about VALUES ('base', ?)", bases[:1])
            about = dict(self._file.execute("SELECT name, value FROM about").fetchall())
        except sqlite3.Error as error:
            raise CheckpointError(
                f"{self.path} cannot be opened ({error}). Only one service can use a folder; choose another with folder=..."
            ) from error
        try:
            self.aliases = _aliases(folder, about, bases)
        except CheckpointError:
            self._file.close()
            raise
        for path in bases:
            if self.aliases[about["base"]] == path:
                self._add("INSERT OR REPLACE INTO about VALUES (?, ?)", f"base:{path}", path)
            if (content := _content_of(path)) is not None:
                self._add("INSERT OR REPLACE INTO about VALUES (?, ?)", f"content:{path}", content)
                if self.aliases[about["base"]] == path:
                    self._add("INSERT OR REPLACE INTO about VALUES ('content', ?)", content)

    def session(self, session_id: str, tenant: str) -> None:
        self._add("INSERT OR REPLACE INTO sessions VALUES (?, ?)", session_id, tenant)

    def sampler(self, sampler_id: str, session_id: str, base: str, digest: str | None, path: str | None) -> None:
        self._add("INSERT OR REPLACE INTO samplers VALUES (?, ?, ?, ?, ?)", sampler_id, session_id, base, digest, path)

    def drop_sampler(self, sampler_id: str) -> None:
        self._add("DELETE FROM samplers WHERE sampler = ?", sampler_id)

    def accept(self, request: AcceptedRequest) -> None:
        """Add a request. A refused request is its own answer."""
        self._add(
            "INSERT OR IGNORE INTO requests VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, NULL, NULL, NULL)",
            request.request_id, request.session_id, request.owner, request.seq_id, request.route, request.tenant,
            request.digest, request.body,
        )  # fmt: skip

    def answer(self, request_id: str, body: bytes, media_type: str, *, runs_again: bool) -> None:
        """Add the answer of a request; unless it `runs_again` after a kill, its body is dropped."""
        dropped = "" if runs_again else ", body = NULL"
        statement = f"UPDATE requests SET answer = ?, media = ?, done = ?{dropped} WHERE request = ?"
        self._add(statement, body, media_type, time.time(), request_id)

    def cover(self, model_id: str, seq_id: int) -> None:
        """A state of the model has the effects of its requests up to `seq_id`."""
        covered = "owner = ? AND seq BETWEEN 1 AND ?"
        self._add(f"DELETE FROM requests WHERE {covered} AND route = ?", model_id, seq_id, REFUSED)
        self._add(f"UPDATE requests SET body = NULL, route = ? WHERE {covered}", COVERED, model_id, seq_id)

    def end_session(self, session_id: str) -> None:
        for table in ("sessions", "samplers", "requests"):
            self._add(f"DELETE FROM {table} WHERE session = ?", session_id)

    def forget_answers(self, age_s: float) -> None:
        """Drop the answers of requests that need not run again and were answered `age_s` seconds ago."""
        old, before = "body IS NULL AND done < ?", time.time() - age_s
        self._add(f"DELETE FROM requests WHERE {old} AND route IN (?, 'asample')", before, COVERED)
        self._add(f"UPDATE requests SET answer = NULL, route = ? WHERE {old}", REFUSED, before)

    @property
    def is_behind(self) -> bool:
        return bool(self._pending)

    def _add(self, statement: str, *values: object) -> None:
        if not all(map(_is_writable, values)):
            raise RefusedRequest("A text or number of the request cannot be stored. Send another one.")
        with self._lists:
            self._pending.append((statement, values))

    def flush(self) -> None:
        """Write what was added, before this call or by a call that waits; returns once it is on the disk. Raises
        sqlite3.Error, with nothing lost: the next flush tries again. A statement that can never be written is dropped."""
        with self._disk:
            with self._lists:
                batch = list(self._pending)
            if not batch:
                return
            try:
                self._file.execute("BEGIN")
                for statement, values in batch:
                    try:
                        self._file.execute(statement, values)
                    except Exception as error:  # with such a value every later request of every tenant would wait
                        if isinstance(error, sqlite3.Error) and not isinstance(error, _OF_VALUES):
                            raise
                        log.exception("A statement of the journal cannot be written and is dropped: %s", statement)
                self._file.execute("COMMIT")
            finally:
                if self._file.in_transaction:  # a full disk has rolled back already
                    self._file.execute("ROLLBACK")
            with self._lists:
                del self._pending[: len(batch)]

    def sessions(self) -> list[tuple[str, str]]:
        return self._file.execute("SELECT session, tenant FROM sessions").fetchall()

    def samplers(self) -> list[tuple[str, str, str, str | None, str | None]]:
        """Each sampler with its session, base model, digest and path."""
        return self._file.execute("SELECT sampler, session, base, digest, path FROM samplers").fetchall()

    def requests(self) -> Iterator[AcceptedRequest]:
        columns = "request, session, owner, seq, route, tenant, hash, body, answer, media"
        for row in self._file.execute(f"SELECT {columns} FROM requests ORDER BY number").fetchall():
            yield AcceptedRequest(*row)

    def close(self) -> None:
        self.flush()
        self._file.close()


def _aliases(folder: Path, about: Mapping[str, str], bases: Sequence[str]) -> dict[str, str]:
    """Paths that base models had earlier, with their present ones. Raises CheckpointError if `bases` lacks the model
    that the folder belongs to, or the files of another one differ."""
    belongs, contents = about["base"], {path: _content_of(path) for path in bases}
    same = [
        path
        for path, content in contents.items()
        if belongs == path
        or os.path.realpath(belongs) == os.path.realpath(path)
        or (content is not None and about.get("content") == content)
    ]
    if not same:
        raise CheckpointError(
            f"{folder} belongs to a service of {belongs}, not of {', '.join(bases)}. Choose another folder."
        )
    earlier = {name.partition(":")[2]: value for name, value in about.items() if name.startswith("content:")}
    for path, content in contents.items():
        if content is not None and path != same[0] and earlier.get(path, content) != content:
            raise CheckpointError(f"{folder} has models of another {path}, whose files differ. Choose another folder.")
    moved = {e: path for e, value in earlier.items() for path, content in contents.items() if content == value}
    return {**moved, **{value: same[0] for name, value in about.items() if name.startswith("base:")}, belongs: same[0]}


def _content_of(base: str) -> str | None:
    """The digest of the config and of the names and sizes of all files of a model folder, wherever it lies; None for a name."""
    folder = Path(base)
    if not (folder / "config.json").is_file():
        return None
    sizes = sorted((file.name, file.stat().st_size) for file in folder.iterdir() if file.is_file())
    return hashlib.sha256((folder / "config.json").read_bytes() + repr(sizes).encode()).hexdigest()


def trouble(error: sqlite3.Error) -> str:
    """The reason why the journal is not written, as a sentence: the disk, another program, or a fault."""
    text = str(error)
    if "locked" in text or "busy" in text:
        return f"Another program holds the server's journal ({text})."
    if isinstance(error, sqlite3.OperationalError):
        return f"The server's disk does not take its journal ({text})."
    return f"The server's journal is at fault ({text})."


def _is_writable(value: object) -> bool:
    """Whether SQLite can store a value."""
    if isinstance(value, int):
        return -1 << 63 <= value < 1 << 63
    return not isinstance(value, str) or not any("\ud800" <= letter <= "\udfff" for letter in value)


def _committed_frames(wal: Path) -> int | None:
    """Frames of a write-ahead log up to the last one that ends a transaction; None for bytes that are no log."""
    if not wal.is_file() or not wal.stat().st_size:
        return 0
    with wal.open("rb") as file:
        header = file.read(_WAL_HEADER)
        size, salts, committed = int.from_bytes(header[8:12], "big"), header[16:24], 0
        if int.from_bytes(header[:4], "big") not in _WAL_MAGIC or not size:
            return None
        for number in itertools.count():
            file.seek(_WAL_HEADER + number * (_FRAME_HEADER + size))
            frame = file.read(_FRAME_HEADER)
            if frame[8:16] != salts:  # of an earlier log, or the end
                return committed
            committed = number + 1 if any(frame[4:8]) else committed
    return committed
