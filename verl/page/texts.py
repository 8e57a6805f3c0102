"""Texts that are searched by reading all of them: folded to lower case and laid end to end, so that a scan is one `bytes.find`.

A scan finds substrings of any length in any script. An index of trigrams (FTS5) took most of the time of reading samples, and
was slower for frequent words.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

_END = b"\0"


class PackedTexts(NamedTuple):
    """`folded`: the texts, each with an end mark; `owners` (int64): samples; `ends` (int64): where the text of each ends.

    Neighbours with the same text share it: the samples of a group have one prompt.
    """

    owners: bytes
    ends: bytes
    folded: bytes


def fold(text: str) -> bytes:
    """`text` as it is compared: lower case, UTF-8, without the end mark."""
    return text.lower().encode().replace(_END, b" ")


def pack_texts(texts: Iterable[tuple[int, str]]) -> PackedTexts:
    """The texts of (sample, text), in that order."""
    owners, ends, parts, size = array("q"), array("q"), [], 0
    last: str | None = None
    for owner, text in texts:
        if text != last:
            parts.append(fold(text))
            size, last = size + len(parts[-1]) + len(_END), text
        owners.append(owner)
        ends.append(size)
    return PackedTexts(owners.tobytes(), ends.tobytes(), b"".join(part + _END for part in parts))


def owners_with(needle: bytes, packed: PackedTexts) -> list[int]:
    """The samples whose text has the folded `needle`."""
    find = packed.folded.find
    at = find(needle)
    if at < 0:
        return []
    owners, ends = array("q", packed.owners), array("q", packed.ends)
    matching, place = set(), 0  # ends of texts
    while at >= 0:
        place = bisect_right(ends, at, place)
        matching.add(ends[place])
        at = find(needle, ends[place])
    return [owner for owner, end in zip(owners, ends, strict=True) if end in matching]
