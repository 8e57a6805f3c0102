"""One config schema per program: its root section, and everything that is declared about the keys below it."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar, cast

from verl.config.compat import Alias, Compat, load_compat
from verl.config.keys import ALWAYS, Bounds, Family, Key, Section, is_in_range, with_bound_of_unit
from verl.errors import nearest

Level = Literal["error", "warning", "notice"]
LEVELS: tuple[Level, ...] = ("error", "warning", "notice")
R = TypeVar("R", covariant=True)


@dataclass(frozen=True)
class Problem:
    level: Level  # an error stops the run, a warning is probably a mistake, a notice says that a key has no effect here
    key: str
    sentence: str


def error(key: str, sentence: str) -> Problem:
    """A contradiction at `key` that stops the run."""
    return Problem("error", key, sentence)


def warning(key: str, sentence: str) -> Problem:
    """A setting of `key` that is probably a mistake."""
    return Problem("warning", key, sentence)


@dataclass(frozen=True)
class Condition:
    """A condition of a key: `holds` gets the root and the section that holds the key."""

    holds: Callable[[Any, Any], bool]
    because: str  # completes "it is not read, because ..."
    fix: str  # completes "remove it, or ..."; "" if nothing can be set

    def of_keys_in(self, section: str) -> Condition:
        """The condition of a key in `section`; the path of the section replaces "{}" in the texts."""
        prefix = f"{section}." if section else ""
        return replace(self, because=self.because.replace("{}", prefix), fix=self.fix.replace("{}", prefix))


# A rule yields the problems between keys: of the tree (root, keys that the user set), or of every section of one
# class (path of the section, the section, root).
Rule = Callable[[Any, set[str]], Iterator[Problem]]
SectionRule = Callable[[str, Any, Any], Iterator[Problem]]
Derived = dict[str, tuple[object, str]]  # key -> (value, origin)


@dataclass(frozen=True)
class Leaf:
    """One key of the tree with what holds for it, its sections' declarations included."""

    path: str
    default: Any
    key: Key
    inert: str
    conditions: tuple[tuple[str, str], ...]  # (condition, path of the section that it reads)
    sizing: bool
    strict: str
    free: bool  # a mapping with free keys
    owner: type  # class of the section

    @property
    def names_files(self) -> bool:
        """Whether its values are paths, or may be path/to/file.py:name."""
        return self.key.path or self.key.family is not None

    @property
    def annotation(self) -> object:
        """The declared type."""
        return _hints(self.owner)[self.path.rpartition(".")[2]]


@dataclass(frozen=True, eq=False)
class Schema(Generic[R]):
    """The config of one program: its root section with rules, conditions, derived defaults and other spellings.

    `name` is the schema's part of compat.yaml. `follows` has (key, the key that gives its value unless it is set); a followed
    key stands above its followers. `derive(values, given)` derives keys from several keys. `config_names` maps each
    `--config-name` that stands for defaults to the built-in file with them, or "" for the classes' defaults. `config_prefixes`
    are first words of built-in YAML files that are of this program. `group_choices` maps a Hydra config group to its options,
    and each option to the keys that it sets.
    """

    name: str
    root: type[R]
    command: str
    title: str
    config_names: Mapping[str, str]
    config_prefixes: tuple[str, ...]
    conditions: Mapping[str, Condition]
    rules: tuple[Rule, ...] = ()
    section_rules: Mapping[type, SectionRule] = dataclasses.field(default_factory=dict)
    follows: tuple[tuple[str, str], ...] = ()
    derive: Callable[[Mapping[str, object], set[str]], Derived] = lambda values, set_keys: {}
    group_choices: Mapping[str, Mapping[str, Mapping[str, object]]] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def leaves(self) -> dict[str, Leaf]:
        """Every key by its full path, in the order of the tree."""
        return {leaf.path: leaf for leaf in _walk(self.root(), "")}

    @functools.cached_property
    def sections(self) -> dict[str, str]:
        """Full path of every section -> its meaning."""
        return {path: meaning for path, meaning, _ in _sections(self.root(), "")}

    @functools.cached_property
    def sections_by_class(self) -> dict[type, list[str]]:
        """Class, or base class, of sections -> full paths of its sections."""
        by_class: dict[type, list[str]] = {}
        for path, _, node in _sections(self.root(), ""):
            for cls in type(node).__mro__:
                by_class.setdefault(cls, []).append(path)
        return by_class

    @functools.cached_property
    def compat(self) -> Compat:
        """Spellings and values of other releases and trainers, read from compat.yaml on first use."""
        return load_compat(self.name, {cls.__name__: paths for cls, paths in self.sections_by_class.items()})

    def resolve(self, spelled: str) -> tuple[str, Alias | None]:
        """(path in the tree, the alias that led there or None)."""
        return (spelled, None) if spelled in self.leaves else self.compat.resolve(spelled)

    def locate(self, path: str) -> str | None:
        """The key that holds `path`: itself, or the free-form key above it; None when there is none."""
        if path in self.leaves:
            return path
        if not all(path.split(".")):
            return None  # a dot too many: it would name an entry without a name
        parent = path.rpartition(".")[0]
        while parent:
            if parent in self.leaves:
                return parent if self.leaves[parent].free else None
            parent = parent.rpartition(".")[0]
        return None

    def condition(self, name: str, section: str = "") -> Condition:
        """The condition that a key of `section` names as `when`: one of `conditions`, or a key with the values that it must
        have: "algorithm.use_pf_ppo", "actor_rollout_ref.rollout.mode=sync|async"; ".limit" is in the section of the key."""
        if name in self.conditions:
            return self.conditions[name].of_keys_in(section)
        key, _, text = name.partition("=")
        path, values = key.lstrip("."), (text or "True").split("|")

        def holds(root: object, node: object) -> bool:
            return str(value_at(node if key.startswith(".") else root, path)) in values

        full_name = f"{section}{key}".lstrip(".") if key.startswith(".") else path
        return Condition(holds, f"{full_name} is not {' or '.join(values)}", f"set {full_name}={values[0]}")

    def build(self, values: Mapping[str, object]) -> R:
        """The typed tree of a value for every key."""
        return cast("R", _fill(self.root(), "", values))

    def flatten(self, config: object) -> dict[str, object]:
        """The value of every key; the inverse of `build`."""
        nodes = {section: value_at(config, section) for section in {section for _, section, _ in self._places}}
        return {path: getattr(nodes[section], name) for path, section, name in self._places}

    @functools.cached_property
    def _places(self) -> list[tuple[str, str, str]]:
        """Path, section and name of every key."""
        return [(path, *path.rpartition(".")[::2]) for path in self.leaves]

    def problems(self, config: object, set_keys: set[str], registers_later: bool = False) -> Iterator[Problem]:
        """Values out of their bounds, and keys that contradict one another; names of plug-ins unless `registers_later`."""
        for path, value in self.flatten(config).items():
            leaf = self.leaves[path]
            bounds = leaf.key.bounds or Bounds()
            if not leaf.inert and not bounds.hold(value):
                words = bounds.words() if is_in_range(value) else "finite and fit in 64 bits"
                yield error(path, f"{path}={value} must be {words}.")
            if leaf.key.family is not None and not (leaf.key.family.plugins and registers_later):
                yield from self._unknown_names(config, path, leaf.key.family, value)
        for rule in self.rules:
            yield from rule(config, set_keys)
        for cls, section_rule in self.section_rules.items():
            for path in self.sections_by_class.get(cls, ()):
                yield from section_rule(path, value_at(config, path), config)

    def _unknown_names(self, config: object, path: str, family: Family, value: Any) -> Iterator[Problem]:
        values = value if isinstance(value, list) else [value]
        name = next((v for v in values if v is not None and v not in family.names and ":" not in v), None)
        libraries = ("model.external_lib", "actor_rollout_ref.model.external_lib")
        places = [p for p in libraries if p in self.leaves and family.plugins]
        if family.declared_in:
            places.append(f"{path.rpartition('.')[0]}.{family.declared_in}")
        if name is None or any(value_at(config, place) is not None for place in places):
            return
        how = f"declared in {places[-1]}" if family.declared_in else "named as path/to/file.py:name"
        added = f" One of your own is {how}, or registered by {places[0]}." if family.plugins else ""
        hint = (nearest(name, family.names) or f"; there are {', '.join(family.names)}.") + added
        if "," in name:
            hint = f"; several are given as [{name}]."
        if meant := self.compat.other_values.get(path, {}).get(name):
            hint = f"; {meant}."
        yield error(path, f"{path}: there is no {family.what} {name!r}{hint}")


@functools.cache
def _hints(cls: object) -> dict[str, object]:
    """The evaluated annotations of a section."""
    return typing.get_type_hints(cls)


def _walk(
    node: Any, prefix: str, conditions: tuple[tuple[str, str], ...] = (), sizing: bool = False, strict: str = ""
) -> Iterator[Leaf]:
    for f in dataclasses.fields(node):
        key: Key = with_bound_of_unit(f.name, f.metadata["key"])
        value, path = getattr(node, f.name), prefix + f.name
        inner = (*conditions, (key.when, prefix.rstrip("."))) if key.when else conditions
        inner = () if key.when == ALWAYS else inner
        if isinstance(value, Section):
            yield from _walk(value, path + ".", inner, key.sizing or sizing, key.strict or strict)
        else:
            free, refused = str(f.type).startswith("dict["), key.strict or (strict if inner else "")
            yield Leaf(path, value, key, key.inert, inner, key.sizing or sizing, refused, free, type(node))


def _sections(node: Any, prefix: str) -> Iterator[tuple[str, str, Section]]:
    for f in dataclasses.fields(node):
        child = getattr(node, f.name)
        if isinstance(child, Section):
            yield prefix + f.name, f.metadata["key"].meaning, child
            yield from _sections(child, f"{prefix}{f.name}.")


def _fill(node: Any, prefix: str, values: Mapping[str, object]) -> Any:
    changes = {}
    for f in dataclasses.fields(node):
        path, current = prefix + f.name, getattr(node, f.name)
        changes[f.name] = _fill(current, path + ".", values) if isinstance(current, Section) else values[path]
    return dataclasses.replace(node, **changes)


def value_at(root: object, path: str) -> Any:
    """The value or section at a dotted path, through free-form mappings too; None without one. "" is `root`."""
    for name in path.split(".") if path else ():
        root = root.get(name) if hasattr(root, "get") else None
    return root
