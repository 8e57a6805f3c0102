"""The open samples of a prompt, and rows for the ledger's file; the writer's thread makes them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from types import MappingProxyType

import numpy as np

from verl.tracking.ledger.records import TRAINED, Key, SampleDigest, SegmentRecord, digest_with_reward

SAMPLE = np.dtype([("num_tokens", "<i4"), ("digest", "V32"), ("uses", "<i4")])  # uses in the step that trained it
_SCORED = bytes(16)  # behind the 16 bytes of a digest with the reward; a digest of log-probs is there before
_NONE: Mapping[int, SampleDigest] = MappingProxyType({})


@dataclass(slots=True)
class Issued:
    """The open samples of a prompt: a row of `table`, from `first` on, for each of `samples`, and hashes of unfinished ones."""

    attempt: int
    step: int
    row: int  # of the data
    limit: int  # tokens
    samples: Sequence[int]
    table: np.ndarray  # SAMPLE [samples of several prompts]: a view for each prompt would take 14 bytes a sample
    first: int = 0
    scored: int = 0  # the step of their scores
    unfinished: Mapping[int, SampleDigest] = field(default_factory=lambda: _NONE)

    def is_finished(self, sample: int) -> bool:
        """Whether it gets no further tokens."""
        return sample not in self.unfinished and self.entry(sample)["num_tokens"] > 0

    def entry(self, sample: int) -> np.void:
        """Of the table."""
        return self.table[self.first + self.samples.index(sample)]  # type: ignore[no-any-return]

    def num_tokens(self) -> int:
        """Of all samples."""
        return int(self.table["num_tokens"][self.first :][: len(self.samples)].sum())

    def add(self, segment: SegmentRecord) -> tuple[bytes, bytes | None]:
        """Add the next tokens of a sample; returns their content."""
        if segment.sample not in self.unfinished:
            self.unfinished = {**self.unfinished, segment.sample: SampleDigest()}
        digest = self.unfinished[segment.sample]
        content = digest.add(segment)
        self.entry(segment.sample)["num_tokens"] = digest.num_tokens
        return content

    def end_call(self, sample: int, finish_reason: str) -> None:
        """A finished sample no longer needs its hashes: they take a kilobyte."""
        if finish_reason != "length" or self.unfinished[sample].num_tokens >= self.limit:
            self.entry(sample)["digest"] = np.void(self.unfinished[sample].content())
            self.unfinished = {other: digest for other, digest in self.unfinished.items() if other != sample} or _NONE

    def score(self, step: int, sample: int, reward: float) -> None:
        """Its digest is with the reward from now on."""
        content = self.entry(sample)["digest"].tobytes()
        if not self.is_finished(sample):
            content = self.unfinished.get(sample, SampleDigest()).content()
        self.scored, self.entry(sample)["digest"] = step, np.void(digest_with_reward(content, reward) + _SCORED)

    def digest(self, sample: int) -> str | None:
        """Of a scored sample."""
        digest: bytes = self.entry(sample)["digest"].tobytes()
        return digest[:16].hex() if any(digest) and digest.endswith(_SCORED) else None


def rows_of_ends(step: int, ended: Sequence[tuple[int, Issued]], fate: str) -> Iterator[tuple[object, ...]]:
    """The ends of all samples of prompts: as trained if they have uses, else by their `fate`."""
    for ordinal, issued in ended:
        for sample in sorted(issued.samples):
            uses = int(issued.entry(sample)["uses"])
            yield (step, TRAINED if uses else fate, uses, ordinal, sample, issued.attempt)


def by_sample(segments: Iterable[SegmentRecord]) -> Iterator[tuple[Key, Iterator[SegmentRecord]]]:
    """Neighbouring segments of one sample."""
    return groupby(segments, lambda segment: (segment.ordinal, segment.sample))


def row_of_segment(
    step: int, segment: SegmentRecord, content: tuple[object, object], attempt: int, first: int
) -> tuple[object, ...]:
    facts = (step, segment.version, *content, segment.finish_reason, segment.rank, segment.source)
    return (segment.ordinal, segment.sample, attempt, first, *facts)


def is_stored(segment: SegmentRecord) -> bool:
    """Whether its arrays refuse writes, as in a store of several processes."""
    return not any(array is not None and array.flags.writeable for array in (segment.tokens, segment.log_probs))


def rows_of_stored(
    step: int, segments: Iterable[SegmentRecord], counts: Mapping[Key, int], attempts: Mapping[int, int]
) -> Iterator[tuple[object, ...]]:
    """Rows of the segments that are stored, behind the `counts` tokens of their samples."""
    for key, parts in by_sample(segments):
        first = counts.get(key, 0)
        for segment in parts:
            if is_stored(segment):
                arrays = segment.tokens, segment.log_probs
                yield row_of_segment(step, segment, arrays, attempts.get(key[0], 0), first)
            first += len(segment.tokens)
