"""The thread that writes the rows of a run's samples to the ledger."""

import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from verl.errors import CheckpointError, DeadlineError
from verl.foreign_text import valid_utf8
from verl.tracking.files import json_text
from verl.tracking.ledger.file import STATEMENTS, back_up, connect, explained
from verl.tracking.ledger.records import segment_bytes

_MAX_QUEUED = 32  # calls, each with the rows of a batch; a step makes about five
_DEADLINE_S = 300.0
_POLL_S = 0.5  # between two checks whether the writing thread has failed

_Rows = tuple[str, Iterable[tuple[object, ...]]]


@dataclass
class _Call:
    """Work on the open file, after all rows that were queued before it."""

    work: Callable[[sqlite3.Connection], None]
    done: threading.Event = field(default_factory=threading.Event)


class LedgerWriter:
    """Writes rows to the ledger `path` from its own thread, in order, all queued rows in one transaction. A step therefore
    does not wait for the disk.

    An error in the thread is raised by the next call, as CheckpointError. A call that waits longer than `deadline_s` for the
    disk raises DeadlineError.
    """

    def __init__(self, path: Path, *, max_queued: int = _MAX_QUEUED, deadline_s: float = _DEADLINE_S):
        self.path = path
        self._deadline_s = deadline_s
        self._queued: queue.Queue[_Rows | _Call | None] = queue.Queue(max_queued)
        self._failure: Exception | None = None
        self._raised = False
        # a daemon: a disk that hangs must not keep the process alive
        self._thread = threading.Thread(target=self._work, name="ledger", daemon=True)
        self._thread.start()

    def write(self, statement: str, rows: Iterable[tuple[object, ...]]) -> None:
        """Queue rows for one of STATEMENTS, made later perhaps; returns at once unless too many are queued. Any text is
        accepted."""
        self._put((statement, rows), "accepted no rows")

    def flush(self) -> None:
        """Write everything and sync it to the disk."""
        self._wait_for(_Call(_sync), "was not synced")

    def copy_to(self, path: Path) -> None:
        """Write everything, also to the new ledger at `path`; the attribute `path` names it from now on. The folder of the file
        itself may have been removed: it is open."""
        self._wait_for(_Call(partial(back_up, target=path)), "was not copied")
        self.path = path

    def _wait_for(self, call: _Call, failing: str) -> None:
        self._put(call, "accepted no rows")
        deadline = time.monotonic() + self._deadline_s
        while not call.done.wait(_POLL_S):
            self._check()
            if time.monotonic() > deadline:
                raise DeadlineError(self._overdue(failing))

    def close(self) -> None:
        """Write everything and close the file. An error that was raised before is not raised again."""
        if self._failure is None:
            self._put(None, "accepted no rows")
        self._thread.join(self._deadline_s)
        if self._thread.is_alive():
            raise DeadlineError(self._overdue("was not closed"))
        if not self._raised:
            self._check()

    def _put(self, item: _Rows | _Call | None, failing: str) -> None:
        deadline = time.monotonic() + self._deadline_s
        while True:
            self._check()
            try:
                self._queued.put(item, timeout=_POLL_S)
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
                while self._write_queued(db):
                    pass
        except CheckpointError as error:
            self._failure = error
        except Exception as error:  # noqa: BLE001 - a thread that ends unseen would leave the run waiting
            self._failure = CheckpointError(f"The sample ledger {self.path} could not be written: {error!r}.")

    def _write_queued(self, db: sqlite3.Connection) -> bool:
        """Write all queued rows in one transaction; False after the last one."""
        item = self._queued.get()
        db.execute("BEGIN")
        while isinstance(item, tuple):
            statement, rows = item
            db.executemany(STATEMENTS[statement], (tuple(map(_storable, row)) for row in rows))
            try:
                item = self._queued.get_nowait()
            except queue.Empty:
                break
        db.execute("COMMIT")
        if isinstance(item, _Call):
            item.work(db)
            item.done.set()
        return item is not None


def _storable(value: Any) -> object:
    """Parts of rewards are JSON, and arrays are bytes."""
    if isinstance(value, dict):
        return json_text(value)
    if getattr(value, "ndim", 0):
        return segment_bytes(value)
    return valid_utf8(value) if isinstance(value, str) else value


def _sync(db: sqlite3.Connection) -> None:
    """Commit once with synchronous=FULL: this syncs the journal, and so all commits before."""
    (usual,) = db.execute("PRAGMA synchronous").fetchone()
    db.execute("PRAGMA synchronous=FULL")
    db.execute("INSERT OR REPLACE INTO about VALUES ('flushed', ?)", (str(time.time()),))  # a commit needs a change
    db.execute(f"PRAGMA synchronous={usual}")
