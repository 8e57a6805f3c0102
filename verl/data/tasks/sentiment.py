"""Rated sentences as preferences: of two sentences of one kind, people found the chosen one more positive.

The sentences and the mean ratings of 20 people, from -4 to 4, come with the source archive of the package vaderSentiment
(Hutto and Gilbert, ICWSM 2014): film and product reviews, tweets, editorials.
"""

import html
import io
import random
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from verl.data.files import write_parquet
from verl.errors import DataError

KINDS = {
    "movieReviewSnippets": "a film",
    "amazonReviewSnippets": "a product",
    "tweets": "your day",
    "nytEditorialSnippets": "the news",
}
MIN_MARGIN = 1.0  # difference of two ratings that most people agree on
MAX_CHARACTERS = 240
WORDS = "vader_sentiment_lexicon.txt"


class Sentence(NamedTuple):
    kind: str
    rating: float
    text: str


def read_archive(source: Path) -> tuple[list[Sentence], dict[str, float]]:
    """The rated sentences, and the ratings of words. Raises DataError for a file that is not the package's source archive."""
    try:
        with tarfile.open(source) as outer:
            inner = next(m for m in outer if m.name.endswith("hutto_ICWSM_2014.tar.gz"))
            content = outer.extractfile(inner)
            assert content is not None
            with tarfile.open(fileobj=io.BytesIO(content.read())) as archive:
                texts = {
                    Path(member.name).name: file.read().decode("utf-8", "replace")
                    for member in archive
                    if member.name.endswith(("_GroundTruth.txt", WORDS)) and (file := archive.extractfile(member))
                }
        words = {cells[0]: float(cells[1]) for line in texts[WORDS].splitlines() if len(cells := line.split("\t")) > 1}
        sentences = [
            Sentence(kind, float(cells[1]), html.unescape(cells[2]).strip())
            for kind in KINDS
            for line in texts[f"{kind}_GroundTruth.txt"].splitlines()
            if len(cells := line.split("\t")) == 3
        ]
    except (OSError, tarfile.TarError, StopIteration, KeyError, ValueError) as error:
        raise DataError(
            f"{source} is not the source archive of vaderSentiment 3.3.2 ({type(error).__name__}). Get it with "
            "`pip download --no-deps --no-binary :all: vaderSentiment==3.3.2`."
        ) from error
    return [sentence for sentence in sentences if 0 < len(sentence.text) <= MAX_CHARACTERS], words


def pairs_of(sentences: list[Sentence], count: int, rng: random.Random) -> list[dict[str, object]]:
    """`count` rows {prompt, chosen, rejected, margin}; both sentences of a row are of one kind."""
    by_kind = {kind: [s for s in sentences if s.kind == kind] for kind in KINDS}
    rows: list[dict[str, object]] = []
    while len(rows) < count:
        kind = rng.choice(sentences).kind
        low, high = sorted(rng.choices(by_kind[kind], k=2), key=lambda sentence: sentence.rating)
        if high.rating - low.rating >= MIN_MARGIN:
            prompt = f"Say something positive about {KINDS[kind]}."
            margin = round(high.rating - low.rating, 3)
            rows.append({"prompt": prompt, "chosen": f" {high.text}", "rejected": f" {low.text}", "margin": margin})
    return rows


def word_accuracy(rows: list[dict[str, Any]], words: Mapping[str, float]) -> float:
    """The share of pairs that the sum of the words' ratings orders as people did; a tie counts one half."""

    def score(text: str) -> float:
        return sum(words.get(word.strip(".,!?;:\"'()").lower(), 0.0) for word in text.split())

    differences = [score(row["chosen"]) - score(row["rejected"]) for row in rows]
    return sum(0.5 if d == 0 else float(d > 0) for d in differences) / len(differences)


def prepare(source: Path, output: Path, *, num_train: int, num_test: int, seed: int) -> list[str]:
    """Write `output`/{train,test}.parquet; no sentence is in both. Returns one line per file, and a baseline."""
    sentences, words = read_archive(source)
    rng = random.Random(seed)
    rng.shuffle(sentences)
    held_out = len(sentences) // 10
    lines = []
    for split, part, count in (("test", sentences[:held_out], num_test), ("train", sentences[held_out:], num_train)):
        rows = pairs_of(part, count, rng)
        write_parquet(output / f"{split}.parquet", rows)
        lines.append(f"{output / f'{split}.parquet'}: {count} pairs of {len(part)} sentences")
        if split == "test":
            lines.append(
                f"the sum of word ratings orders {word_accuracy(rows, words):.3f} of the test pairs as people did"
            )
    return lines
