"""The journal: requests that the service has accepted, and their answers, in an SQLite file that survives a kill.

about      the base model that the folder belongs to
sessions   sessions that have not ended, with their tenant
samplers   sampling sessions, with the digest of their weights
requests   a request in the order of acceptance, its body while it may have to run again, and its answer

Changes are gathered in memory and written by `flush`, all in one transaction, before an answer leaves. The next start
repeats the requests whose effect is in no saved state of their model; whatever has an answer retains it.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from verl.errors import CheckpointError

NAME = "journal.sqlite"
REFUSED = "refused"  # in place of its route: a request of a model that never runs, whose number is used
COVERED = "covered"  # a request of a model whose effect is in a saved state
BUSY_S = 20.0  # wait for another service in the folder, which may be about to end
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


@dataclass(frozen=True)
class AcceptedRequest:
    """A request of a model or a sampler, its `owner`. Its `body` is None where it need not run again."""

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
    """The journal in `folder`, of a service of the model `base`. Methods are called from any thread; nothing is on the disk
    before `flush`. Raises CheckpointError for a folder that is in use, and for another model's."""

    def __init__(self, folder: Path, base: str):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / NAME
        self._pending: list[tuple[str, tuple[object, ...]]] = []
        self._lists, self._disk = threading.Lock(), threading.Lock()
        try:
            self._file = sqlite3.connect(self.path, timeout=BUSY_S, check_same_thread=False, isolation_level=None)
            self._file.executescript(
                f"PRAGMA locking_mode=EXCLUSIVE; PRAGMA journal_mode=WAL; BEGIN; {_SCHEMA} COMMIT;"
            )
            self._file.execute("PRAGMA synchronous=FULL")
            self._file.execute("INSERT OR IGNORE INTO about VALUES ('base', ?)", (base,))
            (belongs,) = self._file.execute("SELECT value FROM about WHERE name = 'base'").fetchone()
        except sqlite3.Error as error:
            raise CheckpointError(
                f"{self.path} cannot be opened ({error}). Only one service can use a folder; choose another with folder=..."
            ) from error
        if belongs != base:
            raise CheckpointError(f"{folder} belongs to a service of {belongs}, not of {base}. Choose another folder.")

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
        with self._lists:
            self._pending.append((statement, values))

    def flush(self) -> None:
        """Write what was added, before this call or by a call that waits; returns once it is on the disk. Raises
        sqlite3.Error, with nothing lost: the next flush tries again."""
        with self._disk:
            with self._lists:
                batch = list(self._pending)
            if not batch:
                return
            self._file.execute("BEGIN")
            try:
                for statement, values in batch:
                    self._file.execute(statement, values)
                self._file.execute("COMMIT")
            except sqlite3.Error:
                if self._file.in_transaction:  # a full disk has rolled back already
                    self._file.execute("ROLLBACK")
                raise
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
