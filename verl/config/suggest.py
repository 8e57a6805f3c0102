"""The keys that an unknown one may have meant."""

from __future__ import annotations

from difflib import SequenceMatcher
from os.path import commonprefix

from verl.config.aliases import other_spellings
from verl.config.tree import leaves

NUM_COMPARED = 40  # full comparisons per unknown key; the rest is sorted out by common beginnings and ends


def nearest_keys(path: str, count: int = 3) -> list[str]:
    """Full names of the keys closest to `path`: the same last name elsewhere in the tree, or a similar full name."""
    last = path.rpartition(".")[2]
    known = [*leaves(), *other_spellings()]
    known.sort(key=lambda key: -max(_common_ends(path, key), _common_ends(last, key.rpartition(".")[2])))
    full_matcher = SequenceMatcher(b=path, autojunk=False)
    last_matcher = SequenceMatcher(b=last, autojunk=False)
    scored = []
    for candidate in known[:NUM_COMPARED]:
        full_matcher.set_seq1(candidate)
        last_matcher.set_seq1(candidate.rpartition(".")[2])
        full, alike = full_matcher.ratio(), last_matcher.ratio()
        scored.append((max(full, 0.9 * alike + 0.1 * full if alike > 0.8 else 0.0), candidate))
    scored.sort(key=lambda pair: -pair[0])
    return [candidate for score, candidate in scored[:count] if score >= 0.7]


def _common_ends(one: str, other: str) -> float:
    """Share of the characters that lie in a common beginning or a common end."""
    begin = len(commonprefix((one, other)))  # noqa: RUF071 - characters are what is meant
    room = min(len(one), len(other)) - begin
    end = len(commonprefix((one[::-1], other[::-1])))  # noqa: RUF071
    return 2 * (begin + min(end, room)) / (len(one) + len(other))


def clause(path: str) -> str:
    """A clause "; did you mean 'a' or 'b'?" for an unknown key."""
    close = nearest_keys(path)
    if not close:
        return "; docs/config.md lists all keys."
    return "; did you mean " + " or ".join(repr(c) for c in close) + "?"
