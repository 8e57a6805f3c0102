"""The keys that an unknown one may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from os.path import commonprefix


def nearest_keys(known: Iterable[str], spelled: str, path: str | None = None) -> list[str]:
    """Full names of at most three `known` keys closest to an unknown key, the likeliest first. `path` is `spelled`
    with its older spellings replaced, if it has any.

    Keys that are one typo away, if any; else keys with the same last name elsewhere in the tree, or a similar full name.
    """
    known = list(known)
    typos = [key for text in dict.fromkeys((spelled, path or spelled)) for key in one_typo_away(known, text)]
    return list(dict.fromkeys(typos or _similar(known, path or spelled)))[:3]


def one_typo_away(known: Iterable[str], path: str) -> list[str]:
    """Keys that become `path` by inserting, leaving out or replacing one character, or by swapping two neighbours."""
    return sorted(key for key in known if abs(len(key) - len(path)) < 2 and _is_one_typo(path, key))


def _is_one_typo(one: str, other: str) -> bool:
    same = len(commonprefix((one, other)))  # noqa: RUF071 - it compares characters on purpose
    a, b = one[same:], other[same:]
    return a[1:] == b[1:] or a[1:] == b or a == b[1:] or (a[:2] == b[1::-1] and a[2:] == b[2:])


def _similar(known: list[str], path: str) -> list[str]:
    last = path.rpartition(".")[2]
    names = {key.rpartition(".")[2] for key in known}
    same = {
        name: difflib.SequenceMatcher(None, last, name).ratio()
        for name in difflib.get_close_matches(last, names, 5, 0.8)
    }
    close = difflib.get_close_matches(path, known, 5, 0.7)
    scores = {}
    for key in {*close, *(key for key in known if key.rpartition(".")[2] in same)}:
        full = difflib.SequenceMatcher(None, path, key, autojunk=False).ratio()
        scores[key] = max(full, 0.9 * same.get(key.rpartition(".")[2], 0.0) + 0.1 * full)
    return sorted(scores, key=lambda key: (-scores[key], key))


def clause(known: Iterable[str], spelled: str, path: str | None = None) -> str:
    """A clause "; did you mean 'a' or 'b'?" for an unknown key; arguments as in `nearest_keys`."""
    close = nearest_keys(known, spelled, path)
    if not close:
        return "; docs/config.md lists all keys."
    return "; did you mean " + " or ".join(repr(c) for c in close) + "?"
