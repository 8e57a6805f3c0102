"""The open samples of a prompt, and rows for the ledger's file, which are made where they are written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from verl.tracking.ledger.records import TRAINED, Key, SampleDigest, SegmentRecord

SAMPLE = np.dtype([("num_tokens", "<i4"), ("content", "V32"), ("digest", "V16")])  # digests of tokens; with the reward


@dataclass(slots=True)
class Issued:
    """The open samples of a prompt: a row of `table` for each of `samples`, and hashes of unfinished ones."""

    attempt: int
    step: int
    row: int  # of the data
    limit: int  # tokens
    samples: Sequence[int]
    table: np.ndarray  # SAMPLE [samples]
    scored: int = 0  # the step in which they were scored
    unfinished: dict[int, SampleDigest] = field(default_factory=dict)

    def is_finished(self, sample: int) -> bool:
        """Whether it gets no further tokens."""
        return sample not in self.unfinished and self.entry(sample)["num_tokens"] > 0

    def entry(self, sample: int) -> np.void:
        """Of the table."""
        return self.table[self.samples.index(sample)]  # type: ignore[no-any-return]

    def num_tokens(self) -> int:
        """Of all samples."""
        return int(self.table["num_tokens"].sum())

    def add(self, segment: SegmentRecord) -> tuple[bytes, bytes | None]:
        """Add the next tokens of a sample; returns their content."""
        digest = self.unfinished.setdefault(segment.sample, SampleDigest())
        content = digest.add(segment)
        self.entry(segment.sample)["num_tokens"] = digest.num_tokens
        return content

    def end_call(self, sample: int, finish_reason: str) -> None:
        """A sample that is finished needs its hashes no longer, which take a kilobyte."""
        if finish_reason != "length" or self.unfinished[sample].num_tokens >= self.limit:
            self.entry(sample)["content"] = np.void(self.unfinished.pop(sample).content())
            self.unfinished = self.unfinished or {}  # an emptied dict has the memory of a full one

    def content(self, sample: int) -> bytes:
        """The digests of its tokens and log-probs."""
        if self.is_finished(sample):
            return self.entry(sample)["content"].tobytes()  # type: ignore[no-any-return]
        return self.unfinished.get(sample, SampleDigest()).content()


def rows_of_ends(
    step: int, ended: Sequence[tuple[int, Issued]], fate: str, uses: Mapping[int, Sequence[int]] | None = None
) -> Iterator[tuple[object, ...]]:
    """The ends of all samples of prompts: `uses` of them as trained, the others by their `fate`."""
    for ordinal, issued in ended:
        times = Counter((uses or {}).get(ordinal, ()))
        for sample in sorted(issued.samples):
            of_sample = (TRAINED, times[sample]) if times[sample] else (fate, 0)
            yield (step, *of_sample, ordinal, sample, issued.attempt)


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
    step: int, segments: Iterable[SegmentRecord], known: Mapping[Key, int], attempts: Mapping[int, int]
) -> Iterator[tuple[object, ...]]:
    """Rows of the segments that are stored, behind the `known` tokens of their samples."""
    for key, own in by_sample(segments):
        first = known.get(key, 0)
        for segment in own:
            if is_stored(segment):
                arrays = segment.tokens, segment.log_probs
                yield row_of_segment(step, segment, arrays, attempts.get(key[0], 0), first)
            first += len(segment.tokens)
