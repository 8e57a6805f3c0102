"""Declarations of config keys, and the base class of all sections.

A key is *used* (it has an effect, at least when its conditions hold), or *inert*: known to existing scripts, accepted,
and without meaning here for a stated reason. Classes declare the used keys, inert_keys.yaml the inert ones.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

ALWAYS = "always"  # the condition of a key that decides whether the other keys of its section are read
OURS = "only this version has the key, so it asks for something that would not happen"


@dataclass(frozen=True)
class Bounds:
    """Bounds of a number, or of each element of a list; without any it must be in range."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    also: tuple[Any, ...] = ()  # values outside of the bounds that have a special meaning
    length: int | None = None  # number of elements

    def hold(self, value: Any) -> bool:
        """Whether `value` is allowed. None always is, and so is what means something else than a number."""
        if value is None or isinstance(value, str | dict) or value in self.also:
            return True
        if isinstance(value, list):
            return self.length in (None, len(value)) and all(self.hold(element) for element in value)
        if not is_in_range(value):
            return False
        above = value >= (-math.inf if self.ge is None else self.ge) and (self.gt is None or value > self.gt)
        return above and value <= (math.inf if self.le is None else self.le) and (self.lt is None or value < self.lt)

    def words(self) -> str:
        """Completes "must be ..."."""
        if self.ge is not None and self.le is not None:
            text = f"between {self.ge} and {self.le}"
        else:
            named = (("at least", self.ge), ("above", self.gt), ("at most", self.le), ("below", self.lt))
            text = " and ".join(f"{word} {bound}" for word, bound in named if bound is not None)
        text = " or ".join([*map(str, self.also), text])
        return f"a list of {self.length} numbers, each {text}" if self.length else text


def is_in_range(value: object) -> bool:
    """Whether a number, or each element of a list, is finite and, if it is whole, of 64 bits."""
    if isinstance(value, list):
        return all(map(is_in_range, value))
    return math.isfinite(value) if isinstance(value, float) else not isinstance(value, int) or abs(value) < 2**63


_TEN_YEARS_S = 315_360_000
_LARGEST = {  # last word of a key's name, its unit -> largest value: clocks and limits of the system overflow above
    "s": _TEN_YEARS_S, "timeout": _TEN_YEARS_S, "kb": 2**40, "mb": 2**30, "megabytes": 2**30, "gb": 2**20,
}  # fmt: skip


def with_bound_of_unit(name: str, key: Key) -> Key:
    """`key`, not negative and at most as large as the unit in its `name` allows: ten years, or a pebibyte."""
    largest = _LARGEST.get(name.rpartition("_")[2])
    bounds = key.bounds or Bounds()
    if largest is None or key.inert or (bounds.le or bounds.lt or math.inf) <= largest:
        return key
    lowest = 0 if bounds.ge is None and bounds.gt is None else bounds.ge
    return dataclasses.replace(key, bounds=dataclasses.replace(bounds, ge=lowest, le=largest))


_BOUNDS = tuple(f.name for f in dataclasses.fields(Bounds))


@dataclass(frozen=True)
class Family:
    """Names that a key, or each element of a list, may have in addition to path/to/file.py:name. Of a registry these are the
    names that it has when a config is checked."""

    what: str
    names: Collection[str]
    plugins: bool = False  # whether a module of model.external_lib may register names
    declared_in: str = ""  # the sibling key of a file that may declare names


@dataclass(frozen=True)
class Key:
    """The declaration of one key or one section; kept in the dataclass field's metadata."""

    meaning: str
    inert: str = ""  # why it has no effect here; "" for a used key
    when: str = ""  # its condition: it has no effect otherwise (Schema.condition)
    neutral: tuple[object, ...] = ()  # values that ask for nothing, so that an unread one is no error
    sizing: bool = False  # only sizes memory or hardware and cannot change a result, so that an unread one is no error
    strict: str = ""  # why a key that is given and not read is refused; "" if leaving it out changes nothing
    refused: str = ""  # of an inert key: what to do instead, if another value than the default would have an effect
    choices: tuple[object, ...] = ()
    words: tuple[str, ...] = ()  # texts that a key of numbers may have instead
    family: Family | None = None
    bounds: Bounds | None = None
    path: bool = False  # whether it names files or folders: $NAME is replaced, and `~` by their readers


def used(default: object, meaning: str, **declared: Any) -> Any:
    """A key that has an effect if its condition holds. `declared` are fields of Key and Bounds: `when="critic", ge=0, lt=1`."""
    limits = {name: declared.pop(name) for name in _BOUNDS if name in declared}
    return _leaf(default, Key(meaning, bounds=Bounds(**limits) if limits else None, **declared))


ours = partial(used, strict=OURS)  # a key that only this version has


def section(cls: type, meaning: str, *, defaults: dict[str, object] | None = None, **declared: Any) -> Any:
    """A nested section. `declared` are `when`, `strict` and `sizing` of every key below; `defaults` replace the defaults of
    `cls`."""
    return field(default_factory=partial(cls, **(defaults or {})), metadata={"key": Key(meaning, **declared)})


def _leaf(default: object, key: Key) -> object:
    if isinstance(default, list | dict):
        return field(default_factory=partial(type(default), default), metadata={"key": key})
    return field(default=default, metadata={"key": key})


@functools.cache
def _inert_keys() -> dict[str, list[dict[str, Any]]]:
    return cast("dict[str, list[dict[str, Any]]]", read_yaml(Path(__file__).parent / "inert_keys.yaml"))


def read_yaml(file: Path) -> Any:
    """The content of a YAML file of this package."""
    return yaml_loader()(file.read_text(encoding="utf-8")).get_single_data()


def yaml_loader() -> Any:
    """The loader of plain values that takes a tenth of the time: compiled, if libyaml is installed."""
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


_inert_classes: dict[int, type] = {}


def _declare(cls: type, rows: Mapping[str, object], why: str, refused: str) -> None:
    """Add the fields of one group of inert_keys.yaml to a class that becomes a dataclass."""
    for name, row in rows.items():
        kind: object = Section
        if isinstance(row, dict):
            if id(row) not in _inert_classes:  # an anchor of the file is one object
                below: type = type(name, (Section,), {})
                _declare(below, row, why, refused)
                _inert_classes[id(row)] = dataclass(frozen=True)(below)
            value = section(_inert_classes[id(row)], row["meaning"])
        elif isinstance(row, list):
            default, meaning, options = (*row, {})[:3]
            mapping = isinstance(default, dict) or options.get("type") == "mapping"
            kind = dict[str, Any] | None if mapping else Any if default is None else type(default)
            value = _leaf(default, Key(meaning, inert=why, refused=options.get("refused", refused)))
        else:
            continue  # why, refused, meaning
        cls.__annotations__[name] = kind
        setattr(cls, name, value)


@functools.cache
def _names(cls: type) -> dict[str, None]:
    """Names of a section's keys, in order."""
    return {f.name: None for f in dataclasses.fields(cls)}


class Section:
    """Base of all sections: a frozen dataclass that can also be read like a mapping, as users' functions do.

    A subclass has the fields of its body and the fields that inert_keys.yaml declares for its class name.
    """

    def __init_subclass__(cls) -> None:
        for group in _inert_keys().get(cls.__name__, ()):
            _declare(cls, group, group["why"], group.get("refused", ""))

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except AttributeError:
            raise KeyError(name) from None

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def get(self, name: str, default: object = None) -> Any:
        """The value of key `name`, or `default` without such a key."""
        return getattr(self, name) if name in _names(type(self)) else default  # type: ignore[arg-type]

    def keys(self) -> list[str]:
        return list(_names(type(self)))  # type: ignore[arg-type]

    def items(self) -> Iterable[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in self.keys()]
