"""Records of the sample ledger: prompts, generated segments, scores, offsets; and how the columns of a batch become records.

`ordinal` is the index of a prompt in the run's order of prompts: 0 for the first prompt that the run reads.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from verl.data_proto.extras import media_of
from verl.data_proto.media import Media

if TYPE_CHECKING:
    import numpy as np

    from verl.data_proto.proto import DataProto

Key = tuple[int, int]  # (ordinal of the prompt, index of the sample)

_ROWS = 64  # are cut at a time
TRAINED, DROPPED, EVICTED = "trained", "dropped", "evicted"
POLICY, ENVIRONMENT = "policy", "environment"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of the run: its ordinal, epoch and row of the data, and a digest of its tokens.

    >>> Prompt(ordinal=105, epoch=1, row=5, digest="9f2c").row
    5
    """

    ordinal: int
    epoch: int
    row: int
    digest: str


@dataclass(frozen=True)
class SegmentRecord:
    """Consecutive tokens of a response, all sampled by one version of the weights or all written by the environment. A
    response that one call generates is one segment; partial rollouts and turns add more.

    tokens int32 or int64 [tokens]; log_probs float32 or float64 [tokens], None for tokens of the environment.
    """

    ordinal: int
    sample: int
    tokens: np.ndarray
    log_probs: np.ndarray | None
    version: int
    finish_reason: str
    rank: int
    source: str = POLICY


@dataclass(frozen=True, slots=True)
class Scored:
    """A reward with its parts. `error` is why the reward is the default one, or None."""

    ordinal: int
    sample: int
    reward: float
    parts: dict[str, object]
    error: str | None


@dataclass(frozen=True)
class Offset:
    """A place in the ledger: the end of `step`. All prompts before `cursor` have ended. `digest` covers every sample that
    trained up to there, in order."""

    step: int = 0
    cursor: int = 0
    num_trained: int = 0
    digest: str = ""


@dataclass
class OpenSample:
    """A sample that was issued and has not ended."""

    ordinal: int
    sample: int
    attempt: int
    step: int  # that issued it
    split: str
    limit: int  # tokens
    prompt: str  # digest
    row: int  # of the data
    segments: list[SegmentRecord] = field(default_factory=list)


@dataclass
class Snapshot:
    """The state of a tracker at its start. `run` is the id of the run that owns the ledger, `lengths` see ResponseLengths."""

    run: str
    offset: Offset
    waiting: list[OpenSample] = field(default_factory=list)
    lengths: bytes = b""


class SampleDigest:
    """Digest of a sample's tokens and log-probs; independent of how the response was cut into segments."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._tokens, self._log_probs = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)

    def add(self, segment: SegmentRecord) -> tuple[bytes, bytes | None]:
        """Add the next segment; returns its content."""
        self.num_tokens += len(segment.tokens)
        tokens = segment_bytes(segment.tokens)
        log_probs = None if segment.log_probs is None else segment_bytes(segment.log_probs)
        self._tokens.update(tokens)
        self._log_probs.update(log_probs or b"")
        return tokens, log_probs

    def content(self) -> bytes:
        """The digests of tokens and log-probs, 16 bytes each."""
        return self._tokens.digest() + self._log_probs.digest()


def digest_with_reward(content: bytes, reward: float) -> bytes:
    """16 bytes, of the `SampleDigest.content` and the reward of a sample."""
    return hashlib.blake2b(content + struct.pack("<d", float(reward)), digest_size=16).digest()


def segment_bytes(values: np.ndarray) -> bytes:
    """Token ids, or log-probs, as the ledger has them."""
    return (values if values.dtype.kind == "f" else values.astype("<i4", copy=False)).tobytes()


def content_digest(tokens: bytes, log_probs: bytes | None) -> bytes:
    """Eight-byte checksum of a stored segment."""
    return hashlib.blake2b(tokens + (log_probs or b""), digest_size=8).digest()


def prompt_digest(token_ids: Sequence[int], media: Media | None) -> str:
    """Eight-byte digest of a prompt's tokens and images, as 16 hexadecimal digits."""
    images = b"" if media is None else media.digest.encode()
    return hashlib.blake2b(struct.pack(f"<{len(token_ids)}i", *token_ids) + images, digest_size=8).hexdigest()


def chained_digest(before: str, step: int, trained: Iterable[tuple[int, int, int, str | None]]) -> tuple[int, str]:
    """(number, digest) of all samples that trained in `step`. It hashes the digest at the start of the step, and (ordinal,
    sample, uses, digest) of the samples, in order."""
    chain, rows, num_trained = hashlib.blake2b(json.dumps([before, step]).encode(), digest_size=16), iter(trained), 0
    while part := list(itertools.islice(rows, _ROWS)):
        # the lists without commas between them
        chain.update(json.dumps(part)[1:-1].replace("], [", "][").encode())
        num_trained += len(part)
    return num_trained, chain.hexdigest()


class Order(Protocol):
    """The order of a run's prompts."""

    def row(self, ordinal: int) -> tuple[int, int]:
        """(epoch, row) of a prompt."""
        ...


def issued_prompts(prompts: DataProto, order: Order) -> list[Prompt]:
    """The prompts of a batch from the loader, one row each."""
    columns = prompts.batch
    return [
        Prompt(ordinal, order.row(ordinal)[0], row, prompt_digest(ids, media))
        for ordinal, row, ids, media in zip(
            columns["ordinal"].tolist(),
            columns["row_index"].tolist(),
            prompts.non_tensor_batch["prompt_token_ids"],
            media_of(prompts) or [None] * len(prompts),
            strict=True,
        )
    ]


def segments_of(ordinals: np.ndarray, rows: DataProto, num_known: Callable[[Key], int]) -> Iterator[SegmentRecord]:
    """The segments of the rollout's output after the first `num_known((ordinal, sample))` tokens of each row."""
    from verl.data_proto.stored_column import row_arrays
    from verl.data_proto.trajectory import response_lengths, row_cuts

    names = ("responses", "rollout_log_probs", "response_mask", "token_weight_version")
    for at in range(0, len(rows), _ROWS):
        part = rows.slice(at, at + _ROWS)
        columns, reasons = part.batch, part.non_tensor_batch["finish_reason"]
        lengths = response_lengths(columns).tolist()
        ids, log_probs, sampled, versions = (row_arrays(columns[name], lengths) for name in names)
        samples, ranks = columns["sample_index"].tolist(), columns["rollout_rank"].tolist()
        keys = zip(ordinals[at : at + _ROWS].tolist(), samples, ranks, row_cuts(columns), strict=True)
        for i, (ordinal, sample, rank, cuts) in enumerate(keys):
            start_of_new = num_known((ordinal, sample))
            for start, end in itertools.pairwise(cuts):
                new = slice(max(start, start_of_new), end)
                if new.start < end:
                    is_policy = bool(sampled[i][start])
                    facts = (int(versions[i][start]), str(reasons[i]), rank, POLICY if is_policy else ENVIRONMENT)
                    yield SegmentRecord(ordinal, sample, ids[i][new], log_probs[i][new] if is_policy else None, *facts)


def scores_of(batch: DataProto) -> Iterator[Scored]:
    """The reward columns of a batch, one record per row."""
    from verl.data_proto.span_column import sums_of_rows

    objects, rewards = batch.non_tensor_batch, sums_of_rows(batch.batch["token_level_scores"]).data
    rows = zip(keys_of(batch), rewards, objects["reward_parts"], objects["reward_error"], strict=True)
    return (Scored(*key, reward, parts or {}, error) for key, reward, parts, error in rows)


def keys_of(batch: DataProto) -> Iterator[Key]:
    """(ordinal, sample) of every row, as Python's numbers one at a time."""
    columns = batch.batch
    return zip(*(columns[name].numpy().data for name in ("ordinal", "sample_index")), strict=True)
