"""The tokens of samples, read from the ledger file."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from verl.tracking.ledger.book import OpenSample, Piece, Snapshot, content_digest
from verl.tracking.ledger.file import connect, explained, newest_offset


def snapshot(path: Path) -> Snapshot:
    """The newest offset, and the open samples as far as they have been generated."""
    with explained(path), closing(connect(path)) as db:
        (run,) = db.execute("SELECT value FROM about WHERE name = 'run'").fetchone()
        return Snapshot(run, newest_offset(db), open_samples(db))


def open_samples(db: sqlite3.Connection) -> list[OpenSample]:
    """Those that have been issued and have not ended, in order."""
    pieces: dict[tuple[int, int, int], list[Piece]] = defaultdict(list)
    found = db.execute(
        "SELECT p.* FROM pieces p JOIN samples s USING (ordinal, sample, attempt) WHERE s.ended_step IS NULL "
        "ORDER BY ordinal, sample, attempt, first_token"
    )
    for row in found:
        pieces[row[:3]].append(piece_of(row))
    rows = db.execute(
        "SELECT ordinal, sample, attempt, issued_step, split, token_limit, prompt FROM samples WHERE ended_step IS NULL "
        "ORDER BY ordinal, sample, attempt"
    )
    return [replace(OpenSample(*row), pieces=pieces[row[:3]]) for row in rows]


def piece_of(row: tuple[Any, ...]) -> Piece:
    """A row of the table pieces; the width of a log-prob says whether it is float32 or float64. Raises ValueError when the
    content is not what was written."""
    ordinal, sample, _, _, _, version, tokens, log_probs, reason, rank, digest = row
    if digest != content_digest(tokens, log_probs):
        raise ValueError(f"sample {sample} of prompt {ordinal} does not have the content that was written")
    ids = np.frombuffer(tokens, dtype="<i4")
    width = len(log_probs) // max(len(ids), 1)
    return Piece(
        ordinal, sample, ids, np.frombuffer(log_probs, dtype="<f8" if width == 8 else "<f4"), version, reason, rank
    )
