"""Typos in config keys, and what becomes of them."""

import re
import string
from collections.abc import Iterator

from verl.config import PPO
from verl.config.user_settings import UserSettings

# characters of a keyboard except "=" (it ends the key), and characters that look like others
LETTERS = (
    string.ascii_letters
    + string.digits
    + string.punctuation.replace("=", "")
    + " \t"
    + "\u0430\u00e9\u2013\u200b\uff0e"
)


def keys() -> list[str]:
    """Every key of the tree, and every older spelling of one."""
    return [*PPO.leaves, *PPO.compat.exact]


def edits(key: str, rng=None, num_letters: int | None = None) -> Iterator[str]:
    """Every text that one deletion or swap makes of `key`, and for every place insertions and substitutions of each of the
    LETTERS, or of `num_letters` sampled ones."""
    for at in range(len(key) + 1):
        for letter in LETTERS if num_letters is None else rng.sample(LETTERS, num_letters):
            yield key[:at] + letter + key[at:]
        if at == len(key):
            break
        yield key[:at] + key[at + 1 :]
        for letter in LETTERS if num_letters is None else rng.sample(LETTERS, num_letters):
            if letter != key[at]:
                yield key[:at] + letter + key[at + 1 :]
        if at + 1 < len(key) and key[at] != key[at + 1]:
            yield key[:at] + key[at + 1] + key[at] + key[at + 2 :]


def outcome(key: str, edited: str) -> str:
    """The outcome of giving `edited`: "right first", "right among equals" (others are one typo away too), "another key" (or
    an entry of a free mapping), "a section", "a mark" (+ and ~ before a key, and space, say the same key), or the fault."""
    spelled = edited.lstrip().lstrip("+~")
    path, _ = PPO.resolve(spelled)
    user = UserSettings(PPO)
    user.add_overrides([f"{edited}=1"])
    errors = [fault.sentence for fault in user.faults]
    if not errors:
        if spelled == key:
            return "a mark"
        return "another key" if PPO.locate(path) is not None else "accepted"
    if path in PPO.sections:
        return "a section" if "is a section" in errors[0] else errors[0]
    if f"There is no key {spelled!r} (command line)" not in errors[0]:
        return errors[0]
    named = re.findall(r"'([^']*)'", errors[0].partition("did you mean")[2])
    if named[:1] == [key]:
        return "right first"
    if key in named and all(typos_apart(spelled, other) == 1 for other in named[: named.index(key)]):
        return "right among equals"
    return f"{edited!r} for {key!r} is answered with {named}"


EXPECTED = {"right first", "right among equals", "another key", "a section", "a mark"}


def typos_apart(a: str, b: str) -> int:
    """Insertions, deletions, substitutions and swaps of neighbours between two texts (optimal string alignment)."""
    rows = [list(range(len(b) + 1))]
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            best = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                best = min(best, rows[-2][j - 2] + 1)
            row.append(best)
        rows.append(row)
    return rows[-1][-1]


def cases(rng, count, folder):
    """(first part of the key, outcome) of `count` edits at random; without a count of every edit of every key."""
    if count is None:
        chosen = ((key, edited) for key in keys() for edited in edits(key))
    else:
        some = (rng.choice(keys()) for _ in range(count))
        chosen = ((key, rng.choice(list(edits(key, rng, 1)))) for key in some)
    for key, edited in chosen:
        actual = outcome(key, edited)
        if actual not in EXPECTED:
            raise AssertionError(actual)
        yield key.partition(".")[0], actual
