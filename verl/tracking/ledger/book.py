"""What a run knows of its samples: which are open, and before which prompt all have ended. The data cursor is computed here.

    issue ──► generate (at once, or in pieces) ──► score ──► train: ended as trained, or as dropped
      └────────── issued anew: ended as evicted ──────────┘

A run has one book in every process that takes the steps; in the one that leads it also writes each event to the ledger file.
Samples end in the order of their prompts' numbers, whatever the order in which they arrive, so that one number says how far
the data has been used.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from verl.errors import CheckpointError
from verl.tracking.files import json_text

if TYPE_CHECKING:
    import numpy as np

Key = tuple[int, int]  # (ordinal of the prompt, number of the sample)

TRAINED, DROPPED, EVICTED = "trained", "dropped", "evicted"


@dataclass(frozen=True)
class Prompt:
    """A prompt of the run: its number, where the data has it, and a digest of its tokens."""

    ordinal: int
    epoch: int
    row: int
    digest: str


@dataclass(frozen=True)
class Piece:
    """Tokens that one version of the weights added to a sample. A whole response is one piece, unless rollouts are partial.

    tokens int32 [tokens], log_probs float32 or float64 [tokens].
    """

    ordinal: int
    sample: int
    tokens: np.ndarray
    log_probs: np.ndarray
    version: int
    finish_reason: str
    rank: int


@dataclass(frozen=True)
class Scored:
    """A reward with its parts; `error` says why it is the default one, or is None."""

    ordinal: int
    sample: int
    reward: float
    parts: dict[str, Any]
    error: str | None


@dataclass(frozen=True)
class Offset:
    """A place in the ledger: the end of `step`. Prompts before `cursor` have ended; `digest` covers every sample that trained
    up to there, in order."""

    step: int = 0
    cursor: int = 0
    num_trained: int = 0
    digest: str = ""


@dataclass
class OpenSample:
    """A sample that has been issued and has not ended, as the ledger has it."""

    ordinal: int
    sample: int
    attempt: int
    step: int  # that issued it
    split: str
    limit: int  # tokens
    prompt: str  # digest
    pieces: list[Piece] = field(default_factory=list)


@dataclass
class Snapshot:
    """What a book begins with: `run` names the run whose ledger it is."""

    run: str
    offset: Offset
    waiting: list[OpenSample] = field(default_factory=list)


class Writer(Protocol):
    """Takes rows of the tables of verl/tracking/ledger/file.py, for the ledger `path`."""

    path: Path

    def write(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class SampleDigest:
    """Of a sample's tokens, log-probs and reward; the same in however many pieces it was made."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._tokens, self._log_probs = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)

    def add(self, piece: Piece) -> None:
        self.num_tokens += len(piece.tokens)
        self._tokens.update(piece.tokens.tobytes())
        self._log_probs.update(piece.log_probs.tobytes())

    def with_reward(self, reward: float) -> str:
        """32 hexadecimal digits."""
        parts = self._tokens.digest() + self._log_probs.digest() + struct.pack("<d", reward)
        return hashlib.blake2b(parts, digest_size=16).hexdigest()


def content_digest(tokens: bytes, log_probs: bytes) -> bytes:
    """Eight bytes by which a piece is known to be what was written."""
    return hashlib.blake2b(tokens + log_probs, digest_size=8).digest()


@dataclass
class _Issued:
    """The samples of a prompt that are open."""

    attempt: int
    step: int
    contents: dict[int, SampleDigest]
    scored: int = 0  # the step in which they were scored
    digests: dict[int, str] = field(default_factory=dict)


class SampleBook:
    """Every call is one step of the life above; `step` is the one being taken.

    Raises CheckpointError where a sample would be lost or train twice, and when the ledger file cannot be written.
    """

    def __init__(self) -> None:
        self._writer: Writer | None = None
        self._open: dict[int, _Issued] = {}
        self._passed = 0  # prompts before this one are passed over from the next step on
        self.run = ""
        self.offset = Offset()

    def begin(self, snapshot: Snapshot, writer: Writer | None = None) -> None:
        """Go on from `snapshot`."""
        self.run, self.offset, self._writer = snapshot.run, snapshot.offset, writer
        self._open, self._passed = {}, 0
        for sample in snapshot.waiting:
            issued = self._open.setdefault(sample.ordinal, _Issued(sample.attempt, sample.step, {}))
            content = issued.contents.setdefault(sample.sample, SampleDigest())
            for piece in sample.pieces:
                content.add(piece)

    @property
    def path(self) -> Path | None:
        """The ledger file; None where another process writes it."""
        return None if self._writer is None else self._writer.path

    @property
    def cursor(self) -> int:
        """Ordinal of the first prompt that has not ended; the next step begins there."""
        return max(self.offset.cursor, self._passed)

    def num_open(self) -> int:
        """Samples that have been issued and have not ended."""
        return sum(len(issued.contents) for issued in self._open.values())

    def num_open_tokens(self) -> int:
        return sum(content.num_tokens for issued in self._open.values() for content in issued.contents.values())

    def num_tokens(self, key: Key) -> int:
        """Of an open sample, as far as it has been generated."""
        return self._sample(key, "goes on").num_tokens

    def issue(self, step: int, prompts: Iterable[Prompt], *, num_samples: int, split: str, limit: int) -> None:
        """Samples of at most `limit` tokens have been asked for. Those that were open of the same prompts end as evicted."""
        evicted, issued = [], []
        for prompt in prompts:
            ordinal = prompt.ordinal
            if ordinal < self.cursor:
                raise CheckpointError(
                    f"Prompt {ordinal} would train a second time in step {step}: all prompts before {self.cursor} have "
                    "ended. This is a fault of the program; stop the run and report it."
                )
            before = self._open.get(ordinal)
            if before is not None:
                evicted += [(step, EVICTED, 0, ordinal, sample, before.attempt) for sample in before.contents]
            attempt = 0 if before is None else before.attempt + 1
            self._open[ordinal] = _Issued(attempt, step, {sample: SampleDigest() for sample in range(num_samples)})
            issued += [
                (ordinal, sample, attempt, prompt.epoch, prompt.row, prompt.digest, step, split, limit)
                for sample in range(num_samples)
            ]
        self._write("end", evicted)
        self._write("issue", issued)

    def generate(self, step: int, pieces: Sequence[Piece]) -> None:
        """Tokens were added to samples that are open."""
        rows = []
        for piece in pieces:
            content = self._sample((piece.ordinal, piece.sample), "was generated")
            tokens, log_probs, first = piece.tokens.tobytes(), piece.log_probs.tobytes(), content.num_tokens
            content.add(piece)
            key = (piece.ordinal, piece.sample, self._open[piece.ordinal].attempt, first)
            made = (step, piece.version, tokens, log_probs, piece.finish_reason, piece.rank)
            rows.append((*key, *made, content_digest(tokens, log_probs)))
        self._write("generate", rows)

    def score(self, step: int, scores: Sequence[Scored]) -> None:
        """Samples of the step have their rewards; they end when it succeeds."""
        rows = []
        for found in scores:
            content = self._sample((found.ordinal, found.sample), "was scored")
            issued, digest = self._open[found.ordinal], content.with_reward(found.reward)
            issued.scored, issued.digests[found.sample] = step, digest
            rows.append(
                (
                    step,
                    found.reward,
                    json_text(found.parts),
                    found.error,
                    digest,
                    found.ordinal,
                    found.sample,
                    issued.attempt,
                )
            )
        self._write("score", rows)

    def train(self, step: int, keys: Iterable[Key]) -> None:
        """The step succeeded: of the samples that were scored in it, those of `keys` have trained and the others were left
        out. A key may be there several times, where an algorithm draws rows."""
        uses = Counter(keys)
        ending = sorted(ordinal for ordinal, issued in self._open.items() if issued.scored == step)
        if ending != list(range(self.cursor, self.cursor + len(ending))):
            lost = next(o for o in range(self.cursor, self.cursor + len(ending) + 1) if o not in ending)
            raise CheckpointError(
                f"Step {step} passed over prompt {lost}, which would be lost. This is a fault of the program; stop the run "
                "and report it."
            )
        rows, chain = [], hashlib.blake2b(json.dumps([self.offset.digest, step]).encode(), digest_size=16)
        num_trained = self.offset.num_trained
        for ordinal in ending:
            issued = self._open[ordinal]
            for sample in sorted(issued.contents):
                times = uses.pop((ordinal, sample), 0)
                rows.append((step, TRAINED if times else DROPPED, times, ordinal, sample, issued.attempt))
                if times:
                    num_trained += 1
                    chain.update(json.dumps([ordinal, sample, times, issued.digests.get(sample)]).encode())
        if uses:
            self._refuse(next(iter(uses)), f"trained in step {step}")
        for ordinal in ending:
            del self._open[ordinal]
        self.offset = Offset(step, self.cursor + len(ending), num_trained, chain.hexdigest())
        self._write("end", rows)
        self._write("step", [(step, self.offset.cursor, num_trained, self.offset.digest)])

    def pass_over(self, step: int, next_ordinal: int) -> None:
        """The run is back at a checkpoint and goes on, with `step`, behind prompts that shall not train."""
        first, self._passed = self.cursor, max(self.cursor, next_ordinal)
        ended = [ordinal for ordinal in self._open if ordinal < self._passed]
        rows = [
            (step, DROPPED, 0, o, sample, self._open[o].attempt) for o in ended for sample in self._open[o].contents
        ]
        for ordinal in ended:
            del self._open[ordinal]
        self._write("end", rows)
        self._write("pass", [(step, first, self._passed)])

    def commit(self) -> dict[str, Any]:
        """What a checkpoint of the last step records of its samples; all of them are on the disk when this returns."""
        if self._writer is not None:
            self._writer.flush()
        return {"run": self.run, **vars(self.offset)}

    def close(self) -> None:
        """Everything is written and the file is closed when this returns."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _sample(self, key: Key, what: str) -> SampleDigest:
        ordinal, sample = key
        issued = self._open.get(ordinal)
        if issued is None or sample not in issued.contents:
            self._refuse(key, what)
        return issued.contents[sample]

    def _refuse(self, key: Key, what: str) -> NoReturn:
        raise CheckpointError(
            f"Sample {key[1]} of prompt {key[0]} {what}, and it is not open: it has ended or was never asked for. This is a "
            "fault of the program; stop the run and report it."
        )

    def _write(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
        if self._writer is not None and rows:
            self._writer.write(statement, rows)
