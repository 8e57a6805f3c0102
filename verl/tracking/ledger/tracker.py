"""State of a run's samples: which are open, and the prompt before which all have ended (the data cursor).

    issue ──► generate (in one or several segments) ──► score ──► train: ends as trained, or as dropped
      └────────── issued again: the first attempt ends as evicted

Every process that takes the steps has one tracker; rank 0's tracker also writes each event to the ledger file. Samples end in
the order of their prompts, whatever the order in which they arrive, so one cursor describes how far the data is used.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from verl.errors import CheckpointError
from verl.tracking.files import Json
from verl.tracking.ledger import records
from verl.tracking.ledger.file import FIX, NAME, copy, create, holds, rewind, run_of
from verl.tracking.ledger.lengths import ResponseLengths, packed
from verl.tracking.ledger.reader import open_rows, snapshot
from verl.tracking.ledger.writer import LedgerWriter

log = logging.getLogger(__name__)

Segments = Sequence[records.SegmentRecord] | Callable[[Callable[[records.Key], int]], Iterable[records.SegmentRecord]]
IN_CHECKPOINT = Path("samples") / NAME


@dataclass
class _Issued:
    """The open samples of a prompt."""

    attempt: int
    step: int
    row: int  # of the data
    contents: dict[int, records.SampleDigest]
    scored: int = 0  # the step in which they were scored
    digests: dict[int, str] = field(default_factory=dict)


class SampleTracker:
    """Records the life of every sample; `step` is the training step in progress.

    Raises CheckpointError where a sample would be lost or train twice, and when the ledger file cannot be written.
    """

    def __init__(self) -> None:
        self._writer: LedgerWriter | None = None
        self._open: dict[int, _Issued] = {}
        self._digesting = ThreadPoolExecutor(1, "sample digests")
        self._digested: Future[object] = self._digesting.submit(bool)
        self._skipped_to = 0  # prompts before this one are skipped from the next step on
        self.run = ""
        self.offset = records.Offset()
        self.lengths = ResponseLengths()

    def start(self, snapshot: records.Snapshot, writer: LedgerWriter | None = None) -> None:
        """Continue from `snapshot`."""
        self.run, self.offset, self._writer = snapshot.run, snapshot.offset, writer
        self._open, self._skipped_to, self.lengths = {}, 0, ResponseLengths(snapshot.lengths)
        for sample in snapshot.waiting:
            issued = self._open.setdefault(sample.ordinal, _Issued(sample.attempt, sample.step, sample.row, {}))
            content = issued.contents.setdefault(sample.sample, records.SampleDigest())
            for segment in sample.segments:
                content.add(segment)

    @property
    def path(self) -> Path | None:
        """The ledger file; None where another process writes it."""
        return None if self._writer is None else self._writer.path

    @property
    def cursor(self) -> int:
        """Ordinal of the first prompt that has not ended; the next step starts there."""
        return max(self.offset.cursor, self._skipped_to)

    def num_open(self) -> int:
        """Number of samples that were issued and have not ended."""
        return sum(len(issued.contents) for issued in self._open.values())

    def num_open_tokens(self) -> int:
        """Number of tokens generated for open samples."""
        self._digested.result()
        return sum(content.num_tokens for issued in self._open.values() for content in issued.contents.values())

    def num_tokens(self, key: records.Key) -> int:
        """Number of tokens generated for the open sample `key`."""
        return self._sample(key, "is continued").num_tokens

    def issue(self, step: int, prompts: Iterable[records.Prompt], *, num_samples: int, split: str, limit: int) -> None:
        """Record a request for `num_samples` samples of at most `limit` tokens per prompt. Open samples of the same prompts
        end as evicted."""
        evicted, issued = [], []
        self._digested.result()
        for prompt in prompts:
            ordinal = prompt.ordinal
            if ordinal < self.cursor:
                raise CheckpointError(
                    f"Prompt {ordinal} would train a second time in step {step}: all prompts before {self.cursor} have "
                    "ended. This is a fault of the program; stop the run and report it."
                )
            before = self._open.get(ordinal)
            if before is not None:
                evicted += [(step, records.EVICTED, 0, ordinal, sample, before.attempt) for sample in before.contents]
            attempt = 0 if before is None else before.attempt + 1
            self._open[ordinal] = _Issued(
                attempt, step, prompt.row, {sample: records.SampleDigest() for sample in range(num_samples)}
            )
            issued += [
                (ordinal, sample, attempt, prompt.epoch, prompt.row, prompt.digest, step, split, limit)
                for sample in range(num_samples)
            ]
        self._write("end", evicted)
        self._write("issue", issued)

    def generate(self, step: int, segments: Segments) -> None:
        """Record tokens that were added to open samples: segments, or a function that makes them from the number of tokens that
        a sample has. It runs on a thread, because a step may have gigabytes; later calls wait for it and raise its errors."""
        self._digested.result()
        self._digested = self._digesting.submit(self._digest, step, segments)

    def _digest(self, step: int, segments: Segments) -> None:
        rows = []
        for segment in segments(self.num_tokens) if callable(segments) else segments:
            content = self._sample((segment.ordinal, segment.sample), "was generated")
            first, attempt = content.num_tokens, self._open[segment.ordinal].attempt
            # arrays that refuse writes, such as in Ray's store, are read again in place of a copy
            tokens, log_probs = (
                array if array is not None and not array.flags.writeable else data
                for array, data in zip((segment.tokens, segment.log_probs), content.add(segment), strict=True)
            )
            facts = (step, segment.version, tokens, log_probs, segment.finish_reason, segment.rank, segment.source)
            rows.append((segment.ordinal, segment.sample, attempt, first, *facts))
        if self._writer is not None and rows:
            self._writer.write("generate", rows)

    def score(self, step: int, scores: Sequence[records.Scored]) -> None:
        """Record the rewards of samples; they end when the step succeeds."""
        rows = []
        self._digested.result()
        for scored in scores:
            content = self._sample((scored.ordinal, scored.sample), "was scored")
            issued, digest = self._open[scored.ordinal], content.with_reward(scored.reward)
            issued.scored, issued.digests[scored.sample] = step, digest
            key = (scored.ordinal, scored.sample, issued.attempt)
            rows.append((step, scored.reward, scored.parts, scored.error, digest, *key))
        self._write("score", rows)

    def train(self, step: int, keys: Iterable[records.Key]) -> None:
        """Record a step that succeeded. Of the samples scored in it, the samples of `keys` trained and the others were dropped.
        A key occurs several times where the algorithm resamples rows."""
        uses = Counter(keys)
        self._digested.result()
        ending = sorted(ordinal for ordinal, issued in self._open.items() if issued.scored == step)
        if ending != list(range(self.cursor, self.cursor + len(ending))):
            lost = next(o for o in range(self.cursor, self.cursor + len(ending) + 1) if o not in ending)
            raise CheckpointError(
                f"Step {step} skipped prompt {lost}, which would be lost. This is a fault of the program; stop the run and "
                "report it."
            )
        rows, trained, lengths = [], [], []
        for ordinal in ending:
            issued = self._open[ordinal]
            num_tokens = sum(content.num_tokens for content in issued.contents.values())
            lengths.append((issued.row, num_tokens / len(issued.contents)))
            for sample in sorted(issued.contents):
                times = uses.pop((ordinal, sample), 0)
                rows.append(
                    (step, records.TRAINED if times else records.DROPPED, times, ordinal, sample, issued.attempt)
                )
                if times:
                    trained.append((ordinal, sample, times, issued.digests.get(sample)))
        if uses:
            self._reject(next(iter(uses)), f"trained in step {step}")
        for ordinal in ending:
            del self._open[ordinal]
        num_trained = self.offset.num_trained + len(trained)
        digest = records.chained_digest(self.offset.digest, step, trained)
        self.offset = records.Offset(step, self.cursor + len(ending), num_trained, digest)
        self.lengths.add(ended := packed(lengths))
        self._write("end", rows)
        self._write("lengths", [(step, ended)])
        self._write("step", [tuple(vars(self.offset).values())])

    def skip_prompts(self, step: int, next_ordinal: int) -> None:
        """Record that prompts before `next_ordinal` never train: the run went back to a checkpoint and continues, with
        `step`, behind them."""
        self._digested.result()
        first, self._skipped_to = self.cursor, max(self.cursor, next_ordinal)
        ended = [ordinal for ordinal in self._open if ordinal < self._skipped_to]
        rows = [
            (step, records.DROPPED, 0, o, sample, self._open[o].attempt)
            for o in ended
            for sample in self._open[o].contents
        ]
        for ordinal in ended:
            del self._open[ordinal]
        self._write("end", rows)
        self._write("skip", [(step, first, self._skipped_to)])

    def commit(self) -> dict[str, object]:
        """The record of the samples that a checkpoint of the last step keeps. All events are on the disk on return."""
        self._digested.result()
        if self._writer is not None:
            self._writer.flush()
        return {"run": self.run, **vars(self.offset)}

    def move_to(self, path: Path) -> None:
        """Copy the ledger, with all events, to the new file `path`, and use that one from now on."""
        self._digested.result()
        if self._writer is not None:
            self._writer.copy_to(path)

    def close(self) -> None:
        """Write everything and close the file."""
        wait([self._digested])
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _sample(self, key: records.Key, event: str) -> records.SampleDigest:
        ordinal, sample = key
        issued = self._open.get(ordinal)
        if issued is None or sample not in issued.contents:
            self._reject(key, event)
        return issued.contents[sample]

    def _reject(self, key: records.Key, event: str) -> NoReturn:
        raise CheckpointError(
            f"Sample {key[1]} of prompt {key[0]} {event}, and it is not open: it has ended or was never issued. This is a "
            "fault of the program; stop the run and report it."
        )

    def _write(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        self._digested.result()  # tokens are written before what follows them
        if self._writer is not None and rows:
            self._writer.write(statement, rows)


# -- where a ledger starts --------------------------------------------------------------------------------------------


def start_ledger(path: Path, checkpoint: Path | None = None, record: Json | None = None) -> records.Snapshot:
    """Create the ledger `path`, or rewind it to `checkpoint`; returns the state in which the run starts.

    `record` is the record of samples in `checkpoint` (`SampleTracker.commit`). The history comes from the run folder, or
    else from the folder that holds the checkpoint; samples that were open are also in the checkpoint itself. Raises
    CheckpointError when a ledger is damaged, and when the checkpoint's run has a ledger but none that matches the record.
    """
    if checkpoint is None:
        _set_aside(path)
        create(path, uuid.uuid4().hex, records.Offset())
        return snapshot(path)
    if record is None:
        raise CheckpointError(
            f"The checkpoint {checkpoint} has no record of its samples, so it was saved by an earlier version. Resume with it, "
            "or start over with trainer.resume_mode=disable."
        )
    if path.is_symlink():  # the run would write into the file of another, such as this checkpoint
        raise CheckpointError(
            f"The sample ledger {path} is a link to {os.readlink(path)}, which the run would change. {FIX}"
        )
    run, offset = record["run"], records.Offset(**{name: value for name, value in record.items() if name != "run"})
    saved, mismatched = checkpoint / IN_CHECKPOINT, []
    for place in dict.fromkeys(Path(os.path.realpath(p)) for p in (path, checkpoint.parent / NAME)):
        if place.exists() and run_of(place) == run:
            if holds(place, offset):
                rewound = _rewound(place, path, offset.step)
                if not saved.exists() or open_rows(saved) == open_rows(path):
                    return rewound
            mismatched.append(place)
    if mismatched:
        raise CheckpointError(
            f"The sample ledger {mismatched[0]} does not agree with the checkpoint {checkpoint} about what had trained after "
            f"step {offset.step}: one of the two was changed, or they are of different times. {FIX}"
        )
    log.warning(
        "The sample ledger of the run that saved %s is missing. The run continues from the checkpoint's own record; the "
        "history of the samples up to step %d is lost.", checkpoint, offset.step,
    )  # fmt: skip
    if saved.exists():
        return _rewound(saved, path, offset.step)
    _set_aside(path)
    create(path, run, offset)
    return snapshot(path)


def _rewound(source: Path, path: Path, step: int) -> records.Snapshot:
    """Make `path` the ledger `source` as it was at the end of `step`."""
    if os.path.realpath(source) != os.path.realpath(path):
        copied = path.with_name(f".{path.name}.tmp")
        copied.unlink(missing_ok=True)
        copy(source, copied)
        _set_aside(path)
        os.replace(copied, path)
    rewind(path, step)
    return snapshot(path)


def _set_aside(path: Path) -> None:
    """Remove the ledger of another run, or rename it if a step of that run had ended."""
    if not path.exists():
        return
    try:
        keep = snapshot(path).offset.step > 0
    except CheckpointError:
        keep = True  # damaged: its content may still be wanted
    aside = f"superseded_{time.strftime('%Y%m%d-%H%M%S')}_{os.getpid()}_{path.name}"
    # the journal first: a new file must never be found next to the journal of an old file
    for suffix in ("-wal", "-shm", "-journal", ""):
        file = path.with_name(path.name + suffix)
        if file.exists():
            if keep:
                file.rename(path.with_name(aside + suffix))
            else:
                file.unlink()
