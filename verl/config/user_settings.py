"""The user's settings, key by key, under the names of the tree."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.config.command_defaults import NO_FACTS, Face, Facts
from verl.config.compat import clause, one_typo_away
from verl.config.schema import Leaf, Problem, Schema, error
from verl.config.values import parse_override
from verl.errors import ConfigError
from verl.foreign_text import quoted

COMMAND_LINE = "command line"  # the source of overrides
_OF_USER = (COMMAND_LINE, "Python")
ARGUMENT = "the argument "  # begins the source of a key that an argument of a Python call stands for


@dataclass(frozen=True)
class Setting:
    """One key with the value that one source gives it. Entries of a free-form key come as {entry: value}."""

    path: str
    value: Any
    source: str  # "command line", "Python", "the argument model" or "file X"
    spelled: str  # the key as the user wrote it
    text: str | None = None

    @property
    def origin(self) -> str:
        if self.spelled == self.path or self.spelled.startswith(self.path + "."):
            return self.source
        return f"{self.source}, renamed from {self.spelled}"

    def shown(self, leaf: Leaf, value: object) -> str:
        """The key as it was written, with its value; entries of a free-form key by their own names."""
        return self.spelled if leaf.free and self.spelled != self.path else f"{self.spelled}={value}"


@dataclass
class UserSettings:
    """All settings in the order of their application, keys taken back with `~`, and errors on the way."""

    schema: Schema[object]
    settings: list[Setting] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    faults: list[Problem] = field(default_factory=list)
    without_effect: list[tuple[str, str]] = field(default_factory=list)  # (key=value, reason)
    defaults: Face = "release"  # of keys that are not set
    facts: Facts = NO_FACTS
    has_preset: bool = False
    program_reads: Collection[str] | None = (
        None  # names of keys that the user's program reads, if one composed the config
    )

    def add_file(self, source: str, tree: Mapping[str, object]) -> None:
        for spelled, value in self._flatten(tree, "") if tree else ():  # a file may have nothing but a defaults list
            self._add(spelled, value, source, None)

    def add_overrides(self, arguments: Sequence[str]) -> None:
        for argument in arguments:
            try:
                override = parse_override(argument)
            except ConfigError as error:
                self._fault(argument, str(error))
                continue
            key = override.key
            options = self.schema.group_choices.get(key.partition("@")[0])
            if key.startswith(("hydra.", "hydra/")) or key == "hydra":
                self.notices.append(f"{argument} has no effect: outputs go to trainer.default_local_dir.")
            elif options is not None and isinstance(override.value, str):
                self._choose(key, override.value, options)
            elif ("@" in key or "/" in key) and not one_typo_away(self._known(), key):
                self._fault(
                    key,
                    f"{argument!r} chooses a Hydra config group; the groups here are: "
                    f"{', '.join(self.schema.group_choices) or 'none'}. Set the keys themselves.",
                )
            elif override.delete:
                self._delete(key)
            else:
                for spelled, value in self._flatten(override.value, key):
                    self._add(spelled, value, COMMAND_LINE, override.text)

    def _choose(self, group: str, option: str, options: Mapping[str, Mapping[str, object]]) -> None:
        """Take the keys that an option of a Hydra config group stands for."""
        if option not in options:
            self._fault(group, f"{group}={option}: there is no such option; there are {', '.join(options)}.")
        first = next((n for n, s in enumerate(self.settings) if s.source == COMMAND_LINE), len(self.settings))
        for path, value in options.get(option, {}).items():  # below single keys of the command line: they override it
            self.settings.insert(first, Setting(path, value, f"{group}={option}", path))

    def _known(self) -> Iterable[str]:
        """Every spelling of a single key, for suggestions."""
        return (*self.schema.leaves, *self.schema.compat.exact)

    def _add(self, spelled: str, value: object, source: str, text: str | None) -> None:
        path, alias = self.schema.resolve(spelled)
        if alias is not None and value in alias.ignore:
            return
        if alias is not None and alias.values and isinstance(value, bool | str):
            value = alias.values.get(value, value)
        where = self.schema.locate(path)
        by_prefix = alias is not None and spelled not in self.schema.compat.exact
        if by_prefix and where != path and one_typo_away(self._known(), spelled):
            where = None  # no entry of a free-form key, but a typo
        if where is None:
            reasons = (self.schema.compat.without_effect(key, value) for key in (spelled, path))
            if (
                reason := next(filter(None, reasons), "")
                or self._only_elsewhere(path)
                or self._of_program(spelled, path)
            ):
                if value is not None or text is not None:  # null in a file asks for nothing
                    self.without_effect.append((f"{spelled}={value}", reason))
            elif path not in self.schema.sections or value not in (None, {}):
                self._fault(path, self._unknown(spelled, path, source))
            return
        entry = path[len(where) + 1 :]
        for name in reversed(entry.split(".")) if entry else ():
            value = {name: value}
        self.settings.append(Setting(where, value, source, spelled, text))
        for implied, meaning in (alias.implies if alias else {}).items():
            if not any(s.path == implied for s in self.settings):
                self.settings.append(Setting(implied, meaning, source, spelled))

    def _fault(self, key: str, sentence: str) -> None:
        self.faults.append(error(key, sentence))

    def _delete(self, key: str) -> None:
        path, _ = self.schema.resolve(key)
        deleted = [p for p in self.schema.leaves if p == path or p.startswith(path + ".")]
        if not deleted and self.schema.locate(path) is None:
            self._fault(path, self._unknown(key, path, COMMAND_LINE))
            return
        self.settings = [s for s in self.settings if s.path not in deleted and s.spelled != key]
        self.notices.append(f"~{key}: back to its default.")

    def conflicts(self) -> list[Problem]:
        """Keys that one source gives different values, under two spellings or nested and dotted. On a command line the last
        of equal spellings holds."""
        problems, by_key = [], defaultdict[tuple[str, str], list[Setting]](list)
        for setting in self.settings:
            formers = by_key[setting.path, setting.source]
            for former in formers:
                respelled = former.spelled != setting.spelled
                if (respelled or setting.source != COMMAND_LINE) and _clash(former.value, setting.value):
                    both = f"{former.spelled} and {setting.spelled} ({setting.source}) are two spellings of one key,"
                    subject = both if respelled else f"{setting.spelled} ({setting.source}) is"
                    values = f"({former.value!r} and {setting.value!r})"
                    sentence = f"{subject} given with different values {values}. Give only one of them."
                    problems.append(error(setting.path, sentence))
            formers.append(setting)
        for argument in (s for s in self.settings if s.source.startswith(ARGUMENT)):
            for other in self.settings:
                if other.path == argument.path and other.source in _OF_USER and _clash(other.value, argument.value):
                    sentence = (
                        f"{other.spelled}={quoted(other.value)} ({other.source}) and {argument.source} of the call set "
                        "one key to different values. Give only one of them."
                    )
                    problems.append(error(other.path, sentence))
        return problems

    def _flatten(self, value: object, prefix: str) -> Iterator[tuple[str, object]]:
        """(key as written, value); mappings are entered down to keys of the tree, and not into free-form ones."""
        path = self.schema.resolve(prefix)[0] if prefix else ""
        is_key = path in self.schema.leaves
        if is_key and path == prefix:  # a key that means nothing here, of whose entries some have another spelling
            is_key = self.schema.compat.resolve(f"{prefix}.entry")[1] is None
        if not isinstance(value, dict) or not value or is_key:
            if value != "???" and prefix.rpartition(".")[2] != "_target_":
                yield prefix, value
            return
        for name, inner in value.items():
            yield from self._flatten(inner, f"{prefix}.{name}" if prefix else str(name))

    def _only_elsewhere(self, path: str) -> str:
        """The reason why a key of a feature that is not available has no effect; "" for a typo in one of our own."""
        reason = self.schema.compat.read_elsewhere(path)
        return reason if reason and not one_typo_away(self._known(), path) else ""

    def _of_program(self, spelled: str, path: str) -> str:
        """The reason why a key that the user's program reads is no key of verl; "" for a typo and for another trainer's key."""
        section, _, name = path.rpartition(".")
        if self.program_reads is None:
            return ""
        is_ours, is_read = section in ("", *self.schema.sections), name in self.program_reads
        if (is_ours and not is_read) or one_typo_away(self._known(), path):
            return ""
        if self.schema.compat.other_name(spelled, self._known()) and (is_ours or not is_read):
            return ""
        return "it is for the program that composed the config, and verl does not read it"

    def _unknown(self, spelled: str, path: str, source: str) -> str:
        compat = self.schema.compat
        if path in self.schema.sections:
            below = next(p for p in self.schema.leaves if p.startswith(path + "."))[len(path) + 1 :]
            return f"{spelled} ({source}) is a section, not a key. Set keys below it, such as {spelled}.{below}."
        if name := compat.other_name(spelled, self._known()):
            return f"There is no key {spelled!r} ({source}). Set {name} instead."
        return f"There is no key {spelled!r} ({source}){clause(self._known(), spelled, path)}"


def _clash(one: object, other: object) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return any(_clash(one[name], other[name]) for name in one.keys() & other.keys())
    return bool(one != other)
