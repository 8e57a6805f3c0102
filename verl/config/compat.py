"""Other spellings of keys, keys without effect, missing features (compat.yaml), and keys that an unknown key may have meant."""

import difflib
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from os.path import commonprefix
from pathlib import Path
from typing import Any, cast

from verl.config.keys import read_yaml


def nearest_keys(keys: Iterable[str], spelled: str, path: str | None = None) -> list[str]:
    """Full names of at most three of `keys` closest to an unknown key, the likeliest first. `path` is `spelled`
    with its older spellings replaced, if it has any.

    Keys that are one typo away, if any; else keys with the same last name elsewhere in the tree, or a similar full name.
    """
    keys = list(keys)
    typos = [key for text in dict.fromkeys((spelled, path or spelled)) for key in one_typo_away(keys, text)]
    return list(dict.fromkeys(typos or _similar(keys, path or spelled)))[:3]


def one_typo_away(keys: Iterable[str], path: str) -> list[str]:
    """Keys that become `path` by inserting, leaving out or replacing one character, or by swapping two neighbours."""
    return sorted(key for key in keys if abs(len(key) - len(path)) < 2 and _is_one_typo(path, key))


def _is_one_typo(one: str, other: str) -> bool:
    same = len(commonprefix((one, other)))  # noqa: RUF071 - it compares characters on purpose
    a, b = one[same:], other[same:]
    return a[1:] == b[1:] or a[1:] == b or a == b[1:] or (a[:2] == b[1::-1] and a[2:] == b[2:])


def _similar(keys: list[str], path: str) -> list[str]:
    last = path.rpartition(".")[2]
    names = {key.rpartition(".")[2] for key in keys}
    same = {
        name: difflib.SequenceMatcher(None, last, name).ratio()
        for name in difflib.get_close_matches(last, names, 5, 0.8)
    }
    close = difflib.get_close_matches(path, keys, 5, 0.7)
    scores = {}
    for key in {*close, *(key for key in keys if key.rpartition(".")[2] in same)}:
        full = difflib.SequenceMatcher(None, path, key, autojunk=False).ratio()
        scores[key] = max(full, 0.9 * same.get(key.rpartition(".")[2], 0.0) + 0.1 * full)
    return sorted(scores, key=lambda key: (-scores[key], key))


def clause(keys: Iterable[str], spelled: str, path: str | None = None) -> str:
    """A clause "; did you mean 'a' or 'b'?" for an unknown key; arguments as in `nearest_keys`."""
    close = nearest_keys(keys, spelled, path)
    if not close:
        return "; docs/config.md lists all keys."
    return "; did you mean " + " or ".join(repr(c) for c in close) + "?"


FILE = Path(__file__).parent / "compat.yaml"


@dataclass(frozen=True)
class Alias:
    """Another spelling of a key. `old` and `new` that end with a dot rename everything below them."""

    old: str
    new: str
    ignore: Sequence[object] = (None,)  # values of the spelling that ask for nothing
    implies: Mapping[str, object] = field(default_factory=dict)  # other keys that it sets, unless they are given
    values: Mapping[Any, Any] = field(default_factory=dict)  # its values -> values of the key


@dataclass(frozen=True)
class Removed:
    """An older key without effect; a key that ends with a dot stands for everything below it."""

    key: str
    why: str
    only_off: bool = False  # only while its value is off; with another value it is an unknown key

    def covers(self, key: str, value: object) -> bool:
        same = key.startswith(self.key) if self.key.endswith(".") else key == self.key
        return same and not (self.only_off and value)


@dataclass(frozen=True)
class Unavailable:
    """Values of a key that choose a feature that this version lacks."""

    path: str
    what: str
    instead: str
    when: bool | Sequence[object] = True  # these values; True: every value that is on, False: every value that is off
    unless: Sequence[object] | None = None  # given: every value but these
    hides: Sequence[str] = ()  # sections that may have unknown keys of the feature

    def chosen(self, value: object) -> bool:
        if value is None:
            return False
        if self.unless is not None:
            return value not in self.unless
        if isinstance(self.when, bool):
            return bool(value) == self.when
        kind = value.partition(":")[0] if isinstance(value, str) else value  # npu:0 is an npu
        return kind in self.when


@dataclass(frozen=True)
class Compat:
    """The rows of one schema; compat.yaml explains each table."""

    aliases: tuple[Alias, ...]
    removed: tuple[Removed, ...]
    other_trainers: Mapping[str, str]
    other_values: Mapping[str, Mapping[str, str]]
    unavailable: tuple[Unavailable, ...]
    only_elsewhere: Mapping[str, str]
    differences: tuple[tuple[str, str, str, str], ...]
    unavailable_configs: Mapping[str, str]

    @functools.cached_property
    def exact(self) -> dict[str, Alias]:
        """Aliases of single keys by their spelling."""
        return {a.old: a for a in self.aliases if not a.old.endswith(".")}

    @functools.cached_property
    def _prefixes(self) -> list[Alias]:
        """Aliases of sections, the most specific first."""
        return sorted((a for a in self.aliases if a.old.endswith(".")), key=lambda a: -len(a.old))

    def resolve(self, path: str) -> tuple[str, Alias | None]:
        """(path in the tree, the last alias used or None). Renames until no row applies any more."""
        used: Alias | None = None
        for _ in range(4):  # a prefix row may lead to an exact one; no chain is longer
            row = self.exact.get(path)
            if row is not None:
                path, used = row.new, row
                continue
            row = next((a for a in self._prefixes if path.startswith(a.old)), None)
            if row is None:
                break
            path, used = row.new + path[len(row.old) :], row
        return path, used

    def other_name(self, spelled: str, keys: Iterable[str]) -> str:
        """The key for another trainer's name, also below a section of ours: `critic.optim.learning_rate` is critic.optim.lr.
        "" for any other name."""
        section, _, last = spelled.rpartition(".")
        if not section or spelled in self.other_trainers:
            return self.other_trainers.get(spelled, "")
        if name := self.other_trainers.get(section.partition(".")[0]):
            return name
        name = self.other_trainers.get(last, "").partition(" ")[0].rpartition(".")[2]
        below = [key for key in keys if name and key.startswith(f"{section}.") and key.endswith(f".{name}")]
        return next((key for key in below if key == f"{section}.{name}" or len(below) == 1), "")

    def without_effect(self, key: str, value: object) -> str | None:
        """The reason why the older key `key` with this value changes nothing; None when it is no such key."""
        return next((row.why for row in self.removed if row.covers(key, value)), None)

    def read_elsewhere(self, path: str) -> str:
        """The reason why a key of a feature that is not available has no effect; "" for any other key."""
        return next((why for pattern, why in self.only_elsewhere.items() if fnmatchcase(path, pattern)), "")


def load_compat(name: str, classes: Mapping[str, list[str]]) -> Compat:
    """The rows of the schema `name`. `classes`: class of a section -> paths of its sections in the tree; the rows of a class
    hold at each."""
    top = _file()[name]
    parts = [("", top)]
    parts += [(f"{path}.", rows) for cls, rows in _file()["sections"].items() for path in classes.get(cls, ())]
    return Compat(
        aliases=tuple(
            Alias(prefix + old, prefix + new.pop("key"), **new)
            for prefix, rows in parts
            for old, row in rows.get("aliases", {}).items()
            for new in [{"key": row} if isinstance(row, str) else dict(row)]
        ),
        removed=tuple(
            Removed(prefix + key, **_without_keys(row))
            for prefix, rows in parts
            for row in rows.get("removed", ())
            for key in row["keys"]
        ),
        other_trainers=top.get("other_trainers", {}),
        other_values=top.get("other_values", {}),
        unavailable=tuple(
            Unavailable(prefix + key, **_without_keys(row))
            for prefix, rows in parts
            for row in rows.get("unavailable", ())
            for key in row["keys"]
        ),
        only_elsewhere={
            prefix + pattern: row["why"]
            for prefix, rows in parts
            for row in rows.get("only_elsewhere", ())
            for pattern in row["keys"]
        },
        differences=tuple((row["key"], row["theirs"], row["ours"], row["why"]) for row in top.get("differences", ())),
        unavailable_configs=top.get("unavailable_configs", {}),
    )


@functools.cache
def _file() -> dict[str, Any]:
    return cast("dict[str, object]", read_yaml(FILE))


def _without_keys(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "keys"}
