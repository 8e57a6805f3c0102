"""Reading of the sample ledger: every sample of a run, and what became of it.

with Ledger.open("checkpoints/my_run") as ledger:
    ledger.counts()                  trained, pending, defaulted, ...
    ledger.trained(step=12)          tokens, log-probs, reward, version of the weights of each
    ledger.multiset_of_trained()     equal for two runs that trained on the same samples

The run may still be writing.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections import Counter, defaultdict
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.errors import CheckpointError
from verl.tracking.ledger import records
from verl.tracking.ledger.file import NAME, base_of, connect_read_only, explained, newest_offset

if TYPE_CHECKING:
    import numpy as np  # at run time in its users: `verl show` starts without it

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainedSample:
    """A sample that trained, `uses` rows of its step's batch. tokens int32 [tokens]; log_probs float [tokens] under the
    weights of token_versions int64 [tokens], NaN for tokens of the environment. `error` is why the reward is the default
    one, or None."""

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
    parts: dict[str, object]
    error: str | None
    finish_reason: str
    digest: str


@dataclass(frozen=True)
class Counts:
    """Number of samples by fate. `dropped` were scored and left out by a filter, `evicted` were issued again, the scorer of
    `defaulted` failed, `twice` trained in more than one step (never, unless a file was edited). `before` trained before the
    history of this file starts."""

    steps: int
    trained: int
    pending: int
    dropped: int
    evicted: int
    defaulted: int
    twice: int
    before: int


class Ledger:
    """A ledger file, open for reading. Methods raise CheckpointError when the file is damaged."""

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

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    def offset(self) -> records.Offset:
        """The end of the last step in the ledger."""
        with explained(self.path):
            return newest_offset(self._db)

    def counts(self) -> Counts:
        """The number of samples of each fate."""
        self._db.execute("BEGIN")  # one state of the file, while a run writes
        try:
            return self._counts()
        finally:
            self._db.execute("COMMIT")

    def _counts(self) -> Counts:
        offset = self.offset()
        ((dropped, evicted, defaulted),) = self._rows(
            "SELECT total(dropped), total(evicted), total(defaulted) FROM (SELECT * FROM steps ORDER BY step DESC LIMIT 1)"
        )
        newer = self._rows(
            "SELECT fate, count(*), sum(error IS NOT NULL) FROM samples WHERE ended_step IS NULL OR ended_step > ? "
            "GROUP BY fate",
            offset.step,
        )
        fates = Counter({fate: count for fate, count, _ in newer})
        ((twice,),) = self._rows(
            "SELECT count(*) FROM samples AS again WHERE attempt = 1 AND (SELECT count(*) FROM samples AS s WHERE "
            "(s.ordinal, s.sample, s.fate) = (again.ordinal, again.sample, ?)) > 1",
            records.TRAINED,
        )
        with explained(self.path):
            before = base_of(self._db).num_trained
        return Counts(
            steps=offset.step,
            trained=offset.num_trained - before + fates[records.TRAINED],
            pending=fates[None],
            dropped=int(dropped) + fates[records.DROPPED],
            evicted=int(evicted) + fates[records.EVICTED],
            defaulted=int(defaulted) + sum(errors for _, _, errors in newer),
            twice=twice,
            before=before,
        )

    def trained(self, step: int | None = None) -> list[TrainedSample]:
        """The samples that trained in `step` (None: in any), in the order of steps, prompts and samples."""
        rows = self._rows(
            "SELECT ordinal, sample, attempt, epoch, data_row, ended_step, uses, reward, parts, error, digest FROM samples "
            "WHERE fate = ? AND (? IS NULL OR ended_step = ?) ORDER BY ended_step, ordinal, sample",
            *(records.TRAINED, step, step),
        )
        return [self._sample(row) for row in rows]

    def multiset_of_trained(self) -> Counter[tuple[int, int, str]]:
        """(ordinal, sample, digest of tokens, log-probs and reward) of every row that trained."""
        trained: Counter[tuple[int, int, str]] = Counter()
        for *key, uses in self._rows(
            "SELECT ordinal, sample, digest, uses FROM samples WHERE fate = ?", records.TRAINED
        ):
            trained[tuple(key)] += uses
        return trained

    def pending(self) -> list[tuple[int, int]]:
        """(ordinal, sample) of the samples that were issued and have not ended."""
        return self._rows("SELECT ordinal, sample FROM samples WHERE fate IS NULL ORDER BY ordinal, sample")

    def _rows(self, query: str, *values: object) -> list[Any]:
        with explained(self.path):
            return self._db.execute(query, values).fetchall()

    def _sample(self, row: tuple[Any, ...]) -> TrainedSample:
        import numpy as np

        ordinal, sample, attempt, epoch, data_row, step, uses, reward, parts, error, digest = row
        query = "SELECT * FROM segments WHERE ordinal = ? AND sample = ? AND attempt = ? ORDER BY first_token"
        with explained(self.path):
            segments = [_segment_of(r) for r in self._db.execute(query, (ordinal, sample, attempt))]
            content = records.SampleDigest()
            for segment in segments:
                content.add(segment)
            if digest is not None and records.digest_with_reward(content.content(), reward).hex() != digest:
                raise ValueError(f"sample {sample} of prompt {ordinal} does not have the content that was written")
        log_probs = [np.full(len(s.tokens), np.nan, "<f4") if s.log_probs is None else s.log_probs for s in segments]
        return TrainedSample(
            ordinal=ordinal,
            sample=sample,
            epoch=epoch,
            row=data_row,
            step=step,
            uses=uses,
            tokens=np.concatenate([segment.tokens for segment in segments]),
            log_probs=np.concatenate(log_probs),
            token_versions=np.concatenate([np.full(len(segment.tokens), segment.version) for segment in segments]),
            reward=reward,
            parts=json.loads(parts),
            error=error,
            finish_reason=segments[-1].finish_reason,
            digest=digest,
        )


def read_counts(folder: Path) -> Counts | None:
    """The counts of a run folder; None without a readable ledger. An unreadable one is logged."""
    if not (folder / NAME).is_file():
        return None
    try:
        with Ledger.open(folder) as ledger:
            return ledger.counts()
    except CheckpointError as error:
        log.warning("%s", error)
        return None


_OPEN_SEGMENTS = (
    "SELECT p.* FROM samples s CROSS JOIN segments p USING (ordinal, sample, attempt) WHERE s.ended_step IS NULL "
    "ORDER BY ordinal, sample, attempt, first_token"
)
_OPEN_SAMPLES = (
    "SELECT ordinal, sample, attempt, issued_step, split, token_limit, prompt, data_row FROM samples "
    "WHERE ended_step IS NULL ORDER BY ordinal, sample, attempt"
)


def snapshot(path: Path) -> records.Snapshot:
    """The newest offset, the open samples with the segments generated so far, and the lengths of ended ones."""
    with explained(path), closing(connect_read_only(path)) as db:
        segments: dict[tuple[int, int, int], list[records.SegmentRecord]] = defaultdict(list)
        for row in db.execute(_OPEN_SEGMENTS):
            segments[row[:3]].append(_segment_of(row))
        waiting = [replace(records.OpenSample(*row), segments=segments[row[:3]]) for row in db.execute(_OPEN_SAMPLES)]
        (run,) = db.execute("SELECT value FROM about WHERE name = 'run'").fetchone()
        lengths = b"".join(prompts for (prompts,) in db.execute("SELECT prompts FROM lengths ORDER BY step"))
        return records.Snapshot(run, newest_offset(db), waiting, lengths)


def open_rows(path: Path) -> list[tuple[object, ...]]:
    """All columns of the open samples and their segments; equal for two ledgers that continue with the same samples."""
    with explained(path), closing(connect_read_only(path)) as db:
        return [*db.execute(_OPEN_SAMPLES), *db.execute(_OPEN_SEGMENTS)]


def _segment_of(row: tuple[Any, ...]) -> records.SegmentRecord:
    """A row of the table segments; the bytes per log-prob tell float32 from float64. Raises ValueError when the content does
    not match its checksum."""
    import numpy as np

    ordinal, sample, _, _, _, version, tokens, raw, reason, rank, digest, source = row
    if digest != records.content_digest(tokens, raw):
        raise ValueError(f"sample {sample} of prompt {ordinal} does not have the content that was written")
    ids = np.frombuffer(tokens, dtype="<i4")
    width = len(raw or b"") // max(len(ids), 1)
    log_probs = None if raw is None else np.frombuffer(raw, dtype="<f8" if width == 8 else "<f4")
    return records.SegmentRecord(ordinal, sample, ids, log_probs, version, reason, rank, source)
