"""Writes a run's ledger from a thread of its own, so that a step does not wait for the disk."""

from __future__ import annotations

import queue
import sqlite3
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from verl.errors import CheckpointError, DeadlineError
from verl.tracking.ledger.file import STATEMENTS, connect, explained

_MAX_WAITING = 32  # calls, each with the rows of a batch; a step makes about five
_DEADLINE_S = 300.0
_LOOK_S = 0.5  # between two looks whether the thread has failed

_Rows = tuple[str, Sequence[tuple[Any, ...]]]


class LedgerWriter:
    """Takes rows for the ledger `path` and writes them in the order in which they came, as many at once as are waiting.

    What goes wrong in the thread is raised by the next call, as CheckpointError; a call that the disk holds up for longer than
    `deadline_s` raises DeadlineError.
    """

    def __init__(self, path: Path, *, max_waiting: int = _MAX_WAITING, deadline_s: float = _DEADLINE_S):
        self.path = path
        self._deadline_s = deadline_s
        self._waiting: queue.Queue[_Rows | threading.Event | None] = queue.Queue(max_waiting)
        self._failure: Exception | None = None
        self._raised = False
        # a daemon: a disk that hangs for ever must not keep the process alive
        self._thread = threading.Thread(target=self._work, name="ledger", daemon=True)
        self._thread.start()

    def write(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Rows for one of the STATEMENTS of verl/tracking/ledger/file.py; returns at once unless too many are waiting."""
        self._put((statement, rows), "took no more rows")

    def flush(self) -> None:
        """Everything is on the disk when this returns, past any cache of the operating system."""
        done = threading.Event()
        self._put(done, "took no more rows")
        deadline = time.monotonic() + self._deadline_s
        while not done.wait(_LOOK_S):
            self._check()
            if time.monotonic() > deadline:
                raise DeadlineError(self._overdue("was not written out"))

    def close(self) -> None:
        """Everything is written and the file is closed when this returns. A failure that was raised before is not again."""
        if self._failure is None:
            self._put(None, "took no more rows")
        self._thread.join(self._deadline_s)
        if self._thread.is_alive():
            raise DeadlineError(self._overdue("was not closed"))
        if not self._raised:
            self._check()

    def _put(self, item: _Rows | threading.Event | None, failing: str) -> None:
        deadline = time.monotonic() + self._deadline_s
        while True:
            self._check()
            try:
                self._waiting.put(item, timeout=_LOOK_S)
                return
            except queue.Full:
                if time.monotonic() > deadline:
                    raise DeadlineError(self._overdue(failing)) from None

    def _check(self) -> None:
        if self._failure is not None:
            self._raised = True
            raise self._failure

    def _overdue(self, failing: str) -> str:
        return (
            f"The sample ledger {self.path} {failing} within {self._deadline_s:g} s. Check the disk of the run folder."
        )

    def _work(self) -> None:
        try:
            with explained(self.path), closing(connect(self.path)) as db:
                while self._write_waiting(db):
                    pass
        except CheckpointError as error:
            self._failure = error
        except Exception as error:  # noqa: BLE001 - a thread that ends unseen would leave the run waiting
            self._failure = CheckpointError(f"The sample ledger {self.path} could not be written: {error!r}.")

    def _write_waiting(self, db: sqlite3.Connection) -> bool:
        """One transaction with all that is waiting; False at the end."""
        item = self._waiting.get()
        db.execute("BEGIN")
        while isinstance(item, tuple):
            statement, rows = item
            db.executemany(STATEMENTS[statement], rows)
            try:
                item = self._waiting.get_nowait()
            except queue.Empty:
                break
        db.execute("COMMIT")
        if isinstance(item, threading.Event):
            _sync(db)
            item.set()
        return item is not None


def _sync(db: sqlite3.Connection) -> None:
    """With synchronous=FULL a commit puts the journal on the disk, and with it all commits before."""
    (usual,) = db.execute("PRAGMA synchronous").fetchone()
    db.execute("PRAGMA synchronous=FULL")
    db.execute("INSERT OR REPLACE INTO about VALUES ('flushed', ?)", (str(time.time()),))  # a commit needs a change
    db.execute(f"PRAGMA synchronous={usual}")
