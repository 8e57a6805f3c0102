"""The keys that an unknown one may have meant."""

from __future__ import annotations

import functools
from difflib import SequenceMatcher
from os.path import commonprefix

from verl.config.aliases import other_spellings
from verl.config.tree import leaves

NUM_COMPARED = 40  # full comparisons per unknown key; the rest is sorted out by common beginnings and ends


def nearest_keys(spelled: str, path: str | None = None, count: int = 3) -> list[str]:
    """Full names of the keys closest to an unknown one, the likeliest first. `path` is what older spellings in `spelled`
    stand for, if that is something else.

    Those that one slip of the finger turns into it (a character too many, too few or wrong, two that changed places), if
    there are any; else the same last name elsewhere in the tree, or a similar full name.
    """
    slips = [key for text in dict.fromkeys((spelled, path or spelled)) for key in one_slip_away(text)]
    return list(dict.fromkeys(slips or _similar_keys(path or spelled)))[:count]


def one_slip_away(path: str) -> list[str]:
    """Keys that become `path` by inserting, leaving out or replacing one character, or by swapping two neighbours."""
    near = {key for text in _shortened(path) for key in _by_shortened().get(text, ())}
    return sorted(key for key in near if _is_one_slip(path, key))


@functools.cache
def _by_shortened() -> dict[str, list[str]]:
    """Every key by all texts that it becomes when one character is left out, and by itself: two texts that are one slip
    apart have such a text in common."""
    index: dict[str, list[str]] = {}
    for key in (*leaves(), *other_spellings()):
        for text in _shortened(key):
            index.setdefault(text, []).append(key)
    return index


def _shortened(text: str) -> set[str]:
    return {text} | {text[:i] + text[i + 1 :] for i in range(len(text))}


def _is_one_slip(one: str, other: str) -> bool:
    same = len(commonprefix((one, other)))  # noqa: RUF071 - characters are what is meant
    a, b = one[same:], other[same:]
    return a[1:] == b[1:] or a[1:] == b or a == b[1:] or (a[:2] == b[1::-1] and a[2:] == b[2:])


def _similar_keys(path: str) -> list[str]:
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
    return [candidate for score, candidate in scored if score >= 0.7]


def _common_ends(one: str, other: str) -> float:
    """Share of the characters that lie in a common beginning or a common end."""
    begin = len(commonprefix((one, other)))  # noqa: RUF071 - characters are what is meant
    room = min(len(one), len(other)) - begin
    end = len(commonprefix((one[::-1], other[::-1])))  # noqa: RUF071
    return 2 * (begin + min(end, room)) / (len(one) + len(other))


def clause(spelled: str, path: str | None = None) -> str:
    """A clause "; did you mean 'a' or 'b'?" for an unknown key; arguments as in `nearest_keys`."""
    close = nearest_keys(spelled, path)
    if not close:
        return "; docs/config.md lists all keys."
    return "; did you mean " + " or ".join(repr(c) for c in close) + "?"
