"""What the user gave, key by key, brought to the names of the tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.config import aliases, suggest
from verl.config import removed_keys as older
from verl.config.problems import Problem
from verl.config.syntax import parse_override
from verl.config.tree import leaves, sections
from verl.config.unavailable import ANNOUNCED, only_there
from verl.errors import ConfigError


@dataclass(frozen=True)
class Setting:
    """One key with the value that one source gives it. Entries of a free-form key come as {entry: value}."""

    path: str
    value: Any
    source: str  # "command line" or "file X"
    spelled: str  # the key as the user wrote it
    text: str | None = None

    @property
    def origin(self) -> str:
        if self.spelled == self.path or self.spelled.startswith(self.path + "."):
            return self.source
        return f"{self.source}, renamed from {self.spelled}"


@dataclass
class Given:
    """All settings in the order in which they apply, keys taken back with `~`, and what went wrong on the way."""

    settings: list[Setting] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    faults: list[Problem] = field(default_factory=list)
    without_effect: list[tuple[str, str]] = field(default_factory=list)  # (key=value, reason)

    def add_file(self, source: str, tree: dict[str, Any]) -> None:
        for spelled, value in _flatten(tree, ""):
            self._add(spelled, value, source, None)

    def add_overrides(self, arguments: Sequence[str]) -> None:
        for argument in arguments:
            try:
                override = parse_override(argument)
            except ConfigError as error:
                self._fault(argument, str(error))
                continue
            key = override.key
            if key.startswith(("hydra.", "hydra/")) or key == "hydra":
                self.notices.append(f"{argument} has no effect: outputs go to trainer.default_local_dir.")
            elif ("@" in key or "/" in key) and not suggest.one_slip_away(key):
                self._fault(
                    key, f"{argument!r} chooses a Hydra config group, and there are none here. Set the keys themselves."
                )
            elif override.delete:
                self._delete(key)
            else:
                for spelled, value in _flatten(override.value, key):
                    self._add(spelled, value, "command line", override.text)

    def _add(self, spelled: str, value: Any, source: str, text: str | None) -> None:
        path, alias = aliases.resolve(spelled)
        if alias is not None and value in alias.ignore:
            return
        where = locate(path)
        if where is None:
            if reason := older.without_effect(spelled, value) or _only_there(path):
                self.without_effect.append((f"{spelled}={value}", reason))
            elif path not in sections() or value not in (None, {}):
                self._fault(path, _unknown(spelled, path, source))
            return
        entry = path[len(where) + 1 :]
        for name in reversed(entry.split(".")) if entry else ():
            value = {name: value}
        setting = Setting(where, value, source, spelled, text)
        self.settings.append(setting)
        for implied, meaning in (alias.implies if alias else {}).items():
            if not any(s.path == implied for s in self.settings):
                self.settings.append(Setting(implied, meaning, source, spelled))

    def _fault(self, key: str, sentence: str) -> None:
        self.faults.append(Problem("error", key, sentence))

    def _delete(self, key: str) -> None:
        path, _ = aliases.resolve(key)
        known = [p for p in leaves() if p == path or p.startswith(path + ".")]
        if not known and locate(path) is None:
            self._fault(path, _unknown(key, path, "command line"))
            return
        self.settings = [s for s in self.settings if s.path not in known and s.spelled != key]
        self.notices.append(f"~{key}: back to its default.")

    def conflicts(self) -> list[Problem]:
        """Keys that one source gives under two spellings with different values."""
        found = []
        for i, setting in enumerate(self.settings):
            for former in self.settings[:i]:
                same = (former.path, former.source) == (setting.path, setting.source)
                if same and former.spelled != setting.spelled and _clash(former.value, setting.value):
                    sentence = (
                        f"{former.spelled} and {setting.spelled} ({setting.source}) are two spellings of one key, "
                        f"given with different values ({former.value!r} and {setting.value!r}). Give only one of "
                        "them."
                    )
                    found.append(Problem("error", setting.path, sentence))
        return found


def locate(path: str) -> str | None:
    """The key that holds `path`: itself, or the free-form key above it; None when there is none."""
    if path in leaves():
        return path
    if not all(path.split(".")):
        return None  # a dot too many, which would name an entry without a name
    parent = path.rpartition(".")[0]
    while parent:
        if parent in leaves():
            return parent if leaves()[parent].free else None
        parent = parent.rpartition(".")[0]
    return None


def _clash(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return any(_clash(one[name], other[name]) for name in one.keys() & other.keys())
    return bool(one != other)


def _flatten(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """(key as written, value); mappings are entered down to keys of the tree, and not into free-form ones."""
    path = aliases.resolve(prefix)[0] if prefix else ""
    if not isinstance(value, dict) or not value or path in leaves():
        if value != "???" and prefix.rpartition(".")[2] != "_target_":
            yield prefix, value
        return
    for name, inner in value.items():
        yield from _flatten(inner, f"{prefix}.{name}" if prefix else str(name))


def _only_there(path: str) -> str:
    """Why a key of a feature that is not available has no effect; "" for a slip in one of our own."""
    reason = only_there(path)
    return reason if reason and not suggest.one_slip_away(path) else ""


def _unknown(spelled: str, path: str, source: str) -> str:
    if path in sections():
        return (
            f"{spelled} ({source}) is a section, not a key. Set keys below it, such as {spelled}.{_first_below(path)}."
        )
    if spelled in ANNOUNCED:
        return f"{spelled} ({source}): {ANNOUNCED[spelled]}"
    if spelled in older.CALLED:
        return f"There is no key {spelled!r} ({source}); what it says is set by {older.CALLED[spelled]}."
    return f"There is no key {spelled!r} ({source}){suggest.clause(spelled, path)}"


def _first_below(path: str) -> str:
    return next(p for p in leaves() if p.startswith(path + "."))[len(path) + 1 :]
