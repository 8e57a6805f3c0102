"""How many samples of a run there are of each kind."""

from __future__ import annotations

import logging
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from verl.errors import CheckpointError
from verl.tracking.ledger.book import DROPPED, EVICTED, TRAINED
from verl.tracking.ledger.file import NAME, base_of, connect_read_only, explained, newest_offset

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Counts:
    """Samples by what became of them. `dropped` were scored and left out by a filter, `evicted` were sampled anew, `defaulted`
    got the default score because their scorer failed, `twice` trained in more than one step (never, unless a file was changed
    by hand). `before` trained before the history of this file begins."""

    steps: int
    trained: int
    pending: int
    dropped: int
    evicted: int
    defaulted: int
    twice: int
    before: int


def count(db: sqlite3.Connection) -> Counts:
    """Of an open ledger. Raises sqlite3.Error."""
    fates = dict(db.execute("SELECT coalesce(fate, ''), count(*) FROM samples GROUP BY fate"))
    (defaulted,) = db.execute("SELECT count(*) FROM samples WHERE error IS NOT NULL").fetchone()
    (twice,) = db.execute(
        "SELECT count(*) FROM (SELECT 1 FROM samples WHERE fate = ? GROUP BY ordinal, sample HAVING count(*) > 1)",
        (TRAINED,),
    ).fetchone()
    return Counts(
        steps=newest_offset(db).step,
        trained=fates.get(TRAINED, 0),
        pending=fates.get("", 0),
        dropped=fates.get(DROPPED, 0),
        evicted=fates.get(EVICTED, 0),
        defaulted=defaulted,
        twice=twice,
        before=base_of(db).num_trained,
    )


def read_counts(folder: Path) -> Counts | None:
    """The counts of a run folder; None when it has no ledger, or none that can be read, which is logged."""
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        with explained(path), closing(connect_read_only(path)) as db:
            return count(db)
    except CheckpointError as error:
        log.warning("%s", error)
        return None
