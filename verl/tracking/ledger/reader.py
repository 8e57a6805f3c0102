"""The sample ledger, read: every sample of a run, and what became of it.

with Ledger.open("checkpoints/my_run") as ledger:
    ledger.counts()                  trained, pending, defaulted, ...
    ledger.trained(step=12)          tokens, log-probs, reward, version of the weights of each
    ledger.multiset_of_trained()     equal for two runs that trained on the same samples

It may be read while the run goes on. Written by verl/tracking/ledger/book.py through verl/tracking/ledger/writer.py.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from verl.errors import CheckpointError
from verl.tracking.ledger.book import TRAINED, Offset
from verl.tracking.ledger.counts import Counts, count
from verl.tracking.ledger.file import NAME, connect_read_only, explained, newest_offset
from verl.tracking.ledger.pieces import piece_of


@dataclass(frozen=True)
class TrainedSample:
    """`uses` is how many rows of the step's batch it was. tokens int32 [tokens], log_probs float [tokens] under the weights of
    token_versions int64 [tokens]. `error` says why the reward is the default one, or is None."""

    ordinal: int
    sample: int
    epoch: int
    row: int
    step: int
    uses: int
    tokens: np.ndarray
    log_probs: np.ndarray
    token_versions: np.ndarray
    reward: float
    parts: dict[str, Any]
    error: str | None
    finish_reason: str
    digest: str


class Ledger:
    """Raises CheckpointError when the file is damaged."""

    def __init__(self, path: Path, db: sqlite3.Connection):
        self.path = path
        self._db = db

    @classmethod
    def open(cls, run: str | Path) -> Ledger:
        """The ledger of a run folder, or a ledger file. Raises CheckpointError when there is none."""
        path = Path(run).expanduser()
        path = path / NAME if path.is_dir() else path
        if not path.is_file():
            raise CheckpointError(
                f"There is no sample ledger {path}. Give the folder that trainer.default_local_dir named."
            )
        with explained(path):
            return cls(path, connect_read_only(path))

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    def offset(self) -> Offset:
        """The end of the last step that the ledger knows."""
        with explained(self.path):
            return newest_offset(self._db)

    def counts(self) -> Counts:
        """How many samples there are of each kind."""
        with explained(self.path):
            return count(self._db)

    def trained(self, step: int | None = None) -> list[TrainedSample]:
        """The samples that trained in `step` (None: in any), in the order of steps, prompts and samples."""
        rows = self._rows(
            "SELECT ordinal, sample, attempt, epoch, data_row, ended_step, uses, reward, parts, error, digest FROM samples "
            "WHERE fate = ? AND (? IS NULL OR ended_step = ?) ORDER BY ended_step, ordinal, sample",
            (TRAINED, step, step),
        )
        return [self._sample(row) for row in rows]

    def multiset_of_trained(self) -> Counter[tuple[int, int, str]]:
        """(ordinal, sample, digest of tokens, log-probs and reward) of every row that trained."""
        rows = self._rows("SELECT ordinal, sample, digest, uses FROM samples WHERE fate = ?", (TRAINED,))
        found: Counter[tuple[int, int, str]] = Counter()
        for ordinal, sample, digest, uses in rows:
            found[ordinal, sample, digest] += uses
        return found

    def pending(self) -> list[tuple[int, int]]:
        """(ordinal, sample) of what has been issued and has not ended."""
        return self._rows("SELECT ordinal, sample FROM samples WHERE fate IS NULL ORDER BY ordinal, sample", ())

    def _rows(self, query: str, values: tuple[Any, ...]) -> list[Any]:
        with explained(self.path):
            return self._db.execute(query, values).fetchall()

    def _sample(self, row: tuple[Any, ...]) -> TrainedSample:
        ordinal, sample, attempt, epoch, data_row, step, uses, reward, parts, error, digest = row
        query = "SELECT * FROM pieces WHERE ordinal = ? AND sample = ? AND attempt = ? ORDER BY first_token"
        with explained(self.path):
            pieces = [piece_of(piece) for piece in self._db.execute(query, (ordinal, sample, attempt))]
        return TrainedSample(
            ordinal=ordinal,
            sample=sample,
            epoch=epoch,
            row=data_row,
            step=step,
            uses=uses,
            tokens=np.concatenate([piece.tokens for piece in pieces]),
            log_probs=np.concatenate([piece.log_probs for piece in pieces]),
            token_versions=np.concatenate([np.full(len(piece.tokens), piece.version) for piece in pieces]),
            reward=reward,
            parts=json.loads(parts),
            error=error,
            finish_reason=pieces[-1].finish_reason,
            digest=digest,
        )
