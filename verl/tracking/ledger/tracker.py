"""State of a run's samples: the open samples, and the first prompt that has not ended (the data cursor).

    issue ──► generate (in one or several segments) ──► score ──► train: ends as trained, or as dropped
      └────────── issued again: the first attempt ends as evicted

Every process that takes the steps has one tracker; rank 0's tracker also writes each event to the ledger file. Samples end in
the order of their prompts, in any order of arrival, so one cursor describes how far the data is used.
"""

from __future__ import annotations

import logging
import os
import struct
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from verl.errors import CheckpointError
from verl.manifest import put_in_place
from verl.tracking.files import Json, json_text
from verl.tracking.ledger import records
from verl.tracking.ledger.file import FIX, NAME, copy, create, holds, rewind, run_of
from verl.tracking.ledger.reader import open_rows, snapshot
from verl.tracking.ledger.rows import SAMPLE, Issued, by_sample, is_stored, row_of_segment, rows_of_ends, rows_of_stored
from verl.tracking.ledger.writer import LedgerWriter

if TYPE_CHECKING:
    from verl.data_proto.proto import DataProto

log = logging.getLogger(__name__)

Segments = Sequence[records.SegmentRecord] | Callable[[Callable[[records.Key], int]], Iterable[records.SegmentRecord]]
IN_CHECKPOINT = Path("samples") / NAME
_SCORE = struct.Struct("<dqi")  # reward, ordinal, sample


class SampleTracker:
    """Records the life of every sample; `step` is the training step in progress.

    Raises CheckpointError if a sample would be lost or train twice, and when the ledger file cannot be written.
    """

    def __init__(self) -> None:
        self._writer: LedgerWriter | None = None
        self._open: dict[int, Issued] = {}
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
        waiting_of: dict[int, list[records.OpenSample]] = {}
        for sample in snapshot.waiting:
            waiting_of.setdefault(sample.ordinal, []).append(sample)
        for ordinal, waiting in waiting_of.items():
            numbers = [sample.sample for sample in waiting]
            first, table = waiting[0], np.zeros(len(waiting), SAMPLE)
            issued = self._open[ordinal] = Issued(first.attempt, first.step, first.row, first.limit, numbers, table)
            for segment in chain.from_iterable(sample.segments for sample in waiting):
                issued.add(segment)

    @property
    def path(self) -> Path | None:
        """The ledger file; None if another process writes it."""
        return None if self._writer is None else self._writer.path

    @property
    def cursor(self) -> int:
        """Ordinal of the first prompt that has not ended; the next step starts there."""
        return max(self.offset.cursor, self._skipped_to)

    def num_open(self) -> int:
        """Number of samples that were issued and have not ended."""
        return sum(len(issued.samples) for issued in self._open.values())

    def num_open_tokens(self) -> int:
        """Number of tokens generated for open samples."""
        self._digested.result()
        return sum(issued.num_tokens() for issued in self._open.values())

    def num_tokens(self, key: records.Key) -> int:
        """Number of tokens generated for the open sample `key`."""
        return int(self._issued(key, "is continued").entry(key[1])["num_tokens"])

    def issue(self, step: int, prompts: Iterable[records.Prompt], *, num_samples: int, split: str, limit: int) -> None:
        """Record a request for `num_samples` samples of at most `limit` tokens per prompt. Open samples of the same prompts
        end as evicted."""
        self._digested.result()
        prompts, samples, evicted = list(prompts), range(num_samples), list[tuple[int, Issued]]()
        table, issued = np.zeros(len(prompts) * num_samples, SAMPLE), list[tuple[records.Prompt, int]]()
        for number, prompt in enumerate(prompts):
            ordinal = prompt.ordinal
            if ordinal < self.cursor:
                raise CheckpointError(
                    f"Prompt {ordinal} would train a second time in step {step}: all prompts before {self.cursor} have "
                    "ended. This is a fault of the program; stop the run and report it."
                )
            before = self._open.get(ordinal)
            if before is not None:
                evicted.append((ordinal, before))
            attempt = 0 if before is None else before.attempt + 1
            self._open[ordinal] = Issued(attempt, step, prompt.row, limit, samples, table, number * num_samples)
            issued.append((prompt, attempt))
        if evicted:
            self._write("end", rows_of_ends(step, evicted, records.EVICTED))
        rows = (
            (prompt.ordinal, sample, attempt, prompt.epoch, prompt.row, prompt.digest, step, split, limit)
            for prompt, attempt in issued
            for sample in samples
        )
        self._write("issue", rows)

    def generate(self, step: int, segments: Segments) -> None:
        """Record tokens that were added to open samples: segments, or a function that makes them from the number of tokens that
        a sample has. It runs on a thread, because a step may have gigabytes; later calls wait for it and raise its errors. It
        runs again on the thread that writes the file, if its arrays refuse writes, as in Ray's store: nothing of them is held
        here."""
        self._digested.result()
        self._digested = self._digesting.submit(self._digest, step, segments)

    def _digest(self, step: int, segments: Segments) -> None:
        rows, lengths, attempts = list[tuple[object, ...]](), dict[records.Key, int](), dict[int, int]()
        num_stored = 0
        for key, parts in by_sample(segments(self.num_tokens) if callable(segments) else segments):
            (ordinal, sample), issued = key, self._issued(key, "was generated")
            if issued.is_finished(sample):
                self._reject(key, "was generated")
            if first := int(issued.entry(sample)["num_tokens"]):
                lengths[key] = first
            if issued.attempt:
                attempts[ordinal] = issued.attempt
            for segment in parts:
                content = issued.add(segment)
                if callable(segments) and is_stored(segment):
                    num_stored += 1
                else:
                    rows.append(row_of_segment(step, segment, content, issued.attempt, first))
                first += len(segment.tokens)
            issued.end_call(sample, segment.finish_reason)
        self._put("generate", rows)
        if callable(segments) and num_stored:
            self._put("generate", rows_of_stored(step, segments(lambda key: lengths.get(key, 0)), lengths, attempts))

    def score(self, step: int, scores: Iterable[records.Scored]) -> None:
        """Record the rewards of samples; they end when the step succeeds."""
        self._digested.result()
        facts, texts, errors, parts, owners = bytearray(), list[str](), dict[int, str](), None, dict[int, Issued]()
        for number, scored in enumerate(scores):
            key = (scored.ordinal, scored.sample)
            issued = owners[scored.ordinal] = self._issued(key, "was scored")
            issued.score(step, scored.sample, scored.reward)
            facts += _SCORE.pack(scored.reward, *key)
            if scored.parts is not parts:
                parts, text = scored.parts, json_text(scored.parts)
            texts.append(text)
            if scored.error is not None:
                errors[number] = scored.error
        rows = (
            (step, reward, text, errors.get(row), issued.digest(sample), ordinal, sample, issued.attempt)
            for row, ((reward, ordinal, sample), text) in enumerate(zip(_SCORE.iter_unpack(facts), texts, strict=True))
            for issued in (owners[ordinal],)
        )
        self._write("score", rows)

    def train(self, step: int, keys: Iterable[records.Key], *, leaves_out: bool = False) -> None:
        """Record a step that succeeded. Of the samples scored in it, the samples of `keys` trained, and all further ones were
        dropped. A key occurs several times if the algorithm resamples rows. `leaves_out`: prompts between the prompts of the
        step never train, by the choice of a script."""
        self._digested.result()
        scored = {ordinal for ordinal, issued in self._open.items() if issued.scored == step}
        ending = range(self.cursor, max(scored, default=-1) + 1 if leaves_out else self.cursor + len(scored))
        if not leaves_out and not scored.issuperset(ending):
            lost = next(ordinal for ordinal in ending if ordinal not in scored)
            raise CheckpointError(
                f"Step {step} skipped prompt {lost}, which would be lost. This is a fault of the program; stop the run and "
                "report it."
            )
        for ordinal, sample in keys:
            if ordinal not in ending or ordinal not in self._open or sample not in self._open[ordinal].samples:
                self._reject((ordinal, sample), f"trained in step {step}")
            self._open[ordinal].entry(sample)["uses"] += 1
        ended = [(ordinal, self._open.pop(ordinal)) for ordinal in ending if ordinal in self._open]
        trained = (
            (ordinal, sample, uses, issued.digest(sample))
            for ordinal, issued in ended
            for sample in sorted(issued.samples)
            if (uses := int(issued.entry(sample)["uses"]))
        )
        num_trained, digest = records.chained_digest(self.offset.digest, step, trained)
        self.offset = records.Offset(step, self.cursor + len(ending), self.offset.num_trained + num_trained, digest)
        lengths = packed((issued.row, issued.num_tokens() / len(issued.samples)) for _, issued in ended)
        self.lengths.add(lengths)
        if ended:
            self._write("end", rows_of_ends(step, ended, records.DROPPED))
        self._write("lengths", [(step, lengths)])
        self._write("step", [tuple(vars(self.offset).values())])

    def skip_prompts(self, step: int, next_ordinal: int) -> None:
        """Record that prompts before `next_ordinal` never train: the run went back to a checkpoint and continues, with
        `step`, behind them."""
        self._digested.result()
        first, self._skipped_to = self.cursor, max(self.cursor, next_ordinal)
        ended = [(ordinal, issued) for ordinal, issued in self._open.items() if ordinal < self._skipped_to]
        for ordinal, _ in ended:
            del self._open[ordinal]
        if ended:
            self._write("end", rows_of_ends(step, ended, records.DROPPED))
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

    def _issued(self, key: records.Key, event: str) -> Issued:
        ordinal, sample = key
        issued = self._open.get(ordinal)
        if issued is None or sample not in issued.samples:
            self._reject(key, event)
        return issued

    def _reject(self, key: records.Key, event: str) -> NoReturn:
        raise CheckpointError(
            f"Sample {key[1]} of prompt {key[0]} {event}, and it is not open: it has ended or was never issued. This is a "
            "fault of the program; stop the run and report it."
        )

    def _write(self, statement: str, rows: Iterable[tuple[object, ...]]) -> None:
        self._digested.result()  # tokens are written before what follows them
        self._put(statement, rows)

    def _put(self, statement: str, rows: Iterable[tuple[object, ...]]) -> None:
        if self._writer is not None and rows:
            self._writer.write(statement, rows)


# -- the start of a ledger --------------------------------------------------------------------------------------------


def start_ledger(path: Path, checkpoint: Path | None = None, record: Json | None = None) -> records.Snapshot:
    """Create the ledger `path`, or rewind it to `checkpoint`; returns the state of the run at its start.

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
        put_in_place(copied, path)
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


_PROMPT = np.dtype([("row", "<u4"), ("tokens", "<f4")])


def packed(lengths: Iterable[tuple[int, float]]) -> bytes:
    """(row of the data, mean tokens of a sample) of prompts, as the ledger has them."""
    return np.array(list(lengths), _PROMPT).tobytes()


class ResponseLengths:
    """The mean tokens of a sample in the newest ended prompt of each row. They are a function of the steps so far: a resumed
    run begins its prompts in the order of an unbroken one."""

    def __init__(self, prompts: bytes = b""):
        self._tokens = np.zeros(0, np.float32)  # by row, 0 if unknown
        self.add(prompts)

    def add(self, prompts: bytes) -> None:
        """Add prompts as `packed` gave them, the newest last."""
        new = np.frombuffer(prompts, _PROMPT)
        self._tokens.resize(max(len(self._tokens), int(new["row"].max(initial=0)) + 1), refcheck=False)
        self._tokens[new["row"]] = new["tokens"]

    def of(self, rows: np.ndarray) -> np.ndarray:
        """float32 [rows], 0 for rows without a prompt that has ended."""
        return np.where(rows < len(self._tokens), self._tokens.take(rows, mode="clip"), np.float32(0))

    def expected(self, prompts: DataProto) -> DataProto:
        """The loader's prompts with the column expected_tokens, or unchanged if no row has a length."""
        import torch

        from verl.data_proto.proto import DataProto

        tokens = torch.from_numpy(self.of(prompts.batch["row_index"].numpy()))
        return prompts.slice().union(DataProto.from_dict({"expected_tokens": tokens})) if tokens.any() else prompts
