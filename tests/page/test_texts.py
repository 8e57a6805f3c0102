"""Texts that are searched by reading all of them, against a plain loop."""

import random

import pytest

from verl.page.summaries import fold, owners_with, pack_texts

ALPHABET = "aAbÄß \n中%_'\0"


@pytest.mark.parametrize("seed", range(20))
def test_a_scan_finds_what_a_loop_finds(seed):
    rng = random.Random(seed)
    texts = [("".join(rng.choices(ALPHABET, k=rng.randrange(12)))) for _ in range(40)]
    texts = [text for text in texts for _ in range(rng.randrange(1, 4))]  # samples of a group share their prompt
    pairs = [(1000 + 3 * i, text) for i, text in enumerate(texts)]
    packed = pack_texts(pairs)
    assert len(packed.folded) < sum(len(fold(text)) + 1 for text in texts)
    for _ in range(60):
        needle = "".join(rng.choices(ALPHABET, k=rng.randrange(1, 4)))
        expected = [i for i, text in pairs if needle.lower().replace("\0", " ") in text.lower().replace("\0", " ")]
        assert list(owners_with(fold(needle), packed)) == expected


def test_no_match_reaches_from_one_text_into_the_next():
    packed = pack_texts([(1, "ab"), (2, "cd"), (3, "")])
    assert list(owners_with(fold("bc"), packed)) == []
    assert list(owners_with(fold("D"), packed)) == [2]
