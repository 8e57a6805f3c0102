"""One table per pluggable family: name -> object, "module:object", or "path/to/file.py:object".

A family is declared once (`ADVANTAGES = Registry("advantage estimator")`); built-in rows are strings, so that nothing is
imported before it is asked for. Users add rows with the decorator or name their own file in the config.
"""

import ast
import hashlib
import importlib
import importlib.util
import operator
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from verl.distributions import require_part
from verl.errors import ConfigError, DistributionError, NameConfigError, nearest
from verl.regular_files import imported_files, require_regular, syntax_tree
from verl.user_objects import LIBRARIES, differs_from_file, objects_in, require_kind

T = TypeVar("T")


def user_file(path: str) -> Path:
    """The file that `path` names. A path that begins with verl/ and is not below the working directory is looked for in this
    package: scripts that run in a checkout of verl name its files so."""
    file = Path(os.path.abspath(os.path.expanduser(path)))
    if path.startswith("verl/") and not file.is_file():
        return Path(__file__).parent / path.removeprefix("verl/")
    return file


def load_module(path: str) -> ModuleType:
    """The module at `path`: a dotted name, `pkg://dotted.name`, or a `.py` file (imported once per resolved path).

    A file may import other modules of its folder: the folder becomes the last entry of sys.path, so that a `json.py` in it
    does not stand for the standard library's. Raises ConfigError when the file is missing or no regular file, or the import
    fails; the cause is chained.
    """
    path = path.removeprefix("pkg://").removeprefix("file://")
    try:
        if not path.endswith(".py") and "/" not in path and path:
            module = importlib.import_module(path)
            if path.partition(".")[0] != "verl":
                _note_content(module.__file__)
            return module
        file = user_file(path)
        inside = path[path.rfind("/verl/") + 1 :]  # all of a path without /verl/
        if inside.startswith("verl/") and not file.exists() and (packaged := _packaged_module(inside)) is not None:
            return packaged
        require_regular(file if path else path, "The Python file", fix="Name a .py file or a module.")
        if file.suffix != ".py":
            raise ConfigError(
                f"The file {path} does not end in .py; name a Python file, or a module as package.module."
            )
        file = Path(os.path.realpath(file))
        name = "verl_user_" + hashlib.sha1(str(file).encode()).hexdigest()[:12]
        if name in sys.modules:
            return sys.modules[name]
        _note_content(str(file))
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module
    except (ConfigError, DistributionError):
        raise
    except Exception as error:  # a user's file may raise anything while it is imported
        raise ConfigError(f"Importing {path} failed: {type(error).__name__}: {error}") from error


# files of users that were imported -> the digest of their content, and the modules of their folder that they import
_imported: dict[str, tuple[bytes, list[str]]] = {}


def forget_edited_files() -> None:
    """Forget modules of users that have another content than when they were imported, and modules that import one of them: a
    notebook starts run after run."""
    edited = {file for file, (digest, _) in _imported.items() if digest != _digest(file)}
    while importers := {f for f, (_, files) in _imported.items() if f not in edited and not edited.isdisjoint(files)}:
        edited |= importers
    for name, module in list(sys.modules.items()) if edited else ():
        if os.path.realpath(getattr(module, "__file__", None) or "") in edited:
            del sys.modules[name]
    for file in edited:
        del _imported[file]


def _note_content(file: str | None) -> None:
    """Remember the content of a user's file, and of each module of its folder that it imports."""
    waiting = [] if file is None or file.startswith(LIBRARIES) else [os.path.realpath(file)]
    for one in waiting:
        if one not in _imported:
            imports = [os.path.realpath(imported) for imported in imported_files(Path(one))]
            _imported[one] = (_digest(one), imports)
            waiting += imports


def _digest(file: str) -> bytes:
    try:
        return hashlib.sha1(Path(file).read_bytes()).digest()
    except OSError:
        return b""


def _packaged_module(path: str) -> ModuleType | None:
    """The module of this package that `path` (`verl/utils/reward_score/rlla.py`) names in a checkout of another release;
    None without one."""
    name = path.removesuffix(".py").replace("/", ".")
    try:
        return importlib.import_module(name) if importlib.util.find_spec(name) else None
    except ModuleNotFoundError:  # a parent is missing
        return None


_IN_PROCESS = "in_process"
_referenced: dict[str, object] = {}  # objects by the reference that `reference_to` has made in this process


def reference_to(obj: object) -> str:
    """The reference by which `load_object` returns `obj`: "path/to/file.py:name" or "package.module:name". Other processes can
    load these too. "in_process:name", for this process only, for a lambda, an instance, and an object of a notebook, of
    standard input, of a function's body or of `if __name__ == "__main__":`."""
    name, module = getattr(obj, "__qualname__", ""), sys.modules.get(getattr(obj, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    is_global = "." not in name and getattr(module, name, None) is obj and not (file and differs_from_file(obj, file))
    if module is not None and file and is_global and not (module.__name__ == "__main__" and _is_hidden(file, name)):
        spec = module.__spec__  # has the name also of a module that `python -m` runs as __main__
        place = (spec.name if spec is not None else module.__name__) if module.__package__ else Path(file).resolve()
        reference = f"{place}:{name}"
    else:
        label = name.rpartition(".")[2].strip("<>") or type(obj).__name__
        reference = f"{_IN_PROCESS}:{label}_{id(obj):x}"
    _referenced[reference] = obj
    return reference


def _is_hidden(file: str, name: str) -> bool:
    """Whether a script is no file, as standard input, or defines `name` under `if __name__ == "__main__":`, so that processes
    that import it lack the name."""
    body = syntax_tree(Path(file).read_bytes()).body if os.path.isfile(file) else []
    guards = [n for n in body if isinstance(n, ast.If) and "__name__" in ast.unparse(n.test)]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return not body or any(isinstance(n, kinds) and n.name == name for guard in guards for n in ast.walk(guard))


def referenced_name(reference: str) -> str:
    """The name of the object that `reference_to` returned `reference` for."""
    name = reference.rpartition(":")[2]
    return name.rpartition("_")[0] if is_in_process(reference) else name


def without_ids(text: str) -> str:
    """`text` with the names of objects in place of their references in this process; `verl.run.inputs` compares their code."""
    return re.sub(rf"\b{_IN_PROCESS}:(\w+)_[0-9a-f]+", r"\1", text)


def is_in_process(reference: str) -> bool:
    """Whether only the process that made the reference can load it."""
    return reference.startswith(f"{_IN_PROCESS}:")


def with_references(value: object) -> Any:
    """`value` with functions and classes replaced by references, at any depth."""
    if isinstance(value, Mapping):
        return {name: with_references(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [with_references(inner) for inner in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return reference_to(value) if callable(value) else value


def load_object(reference: str) -> Any:
    """The object at "module:object" or "path/to/file.py:object"; raises ConfigError naming what the module does have."""
    if reference in _referenced:
        return _referenced[reference]
    path, _, name = reference.rpartition(":")
    if is_in_process(reference):
        raise ConfigError(
            f"{referenced_name(reference)} exists only in the process that defined it (a lambda, a notebook, standard input "
            "or the body of a function). Define it at the top level of a .py file, so that other processes can import it."
        )
    if not path:
        form = "'module:object' or 'path/to/file.py:object'"
        raise ConfigError(f"{reference!r} is not of the form {form}{objects_in(user_file(name))}")
    module = load_module(path)
    if not hasattr(module, name):
        public = [n for n in dir(module) if not n.startswith("_")]
        raise NameConfigError(f"{path} has no {name!r}{nearest(name, public) or '; it has ' + ', '.join(public[:8])}")
    return getattr(module, name)


def _origin(obj: Any) -> Any:
    """File, line and name of a function or class: a file imported twice registers the same ones again."""
    code = getattr(obj, "__code__", None)
    if code is not None:
        return code.co_filename, code.co_firstlineno, obj.__qualname__
    module = sys.modules.get(getattr(obj, "__module__", ""))
    file = getattr(module, "__file__", None)
    return (file, obj.__qualname__) if file and hasattr(obj, "__qualname__") else id(obj)


def _names(reference: object, obj: object) -> bool:
    """Whether `reference` is the name of `obj` in another process, while the module of `obj` is being imported."""
    path, _, name = reference.rpartition(":") if isinstance(reference, str) else ("", "", "")
    module = getattr(obj, "__module__", "")
    file = getattr(sys.modules.get(module), "__file__", None)
    return (
        bool(name) and name == getattr(obj, "__qualname__", "") and path in (module, str(file and Path(file).resolve()))
    )


def _is_forgotten(taken: object, obj: object) -> bool:
    """Whether `taken` is of an earlier import of the file that defines `obj`."""
    name = getattr(obj, "__module__", "")
    module = sys.modules.get(name)
    is_known = os.path.realpath(getattr(module, "__file__", None) or "") in _imported
    current = getattr(module, getattr(taken, "__qualname__", ""), None)
    return is_known and getattr(taken, "__module__", None) == name and current is not taken


def match_all(
    key: str, entries: Iterable[str], names: Iterable[str], what: str, matches: Callable[[str, str], bool] = operator.eq
) -> list[str]:
    """The entries of `names` that an entry of the config key `key` matches, in order. `what` describes a name; `matches` gets a
    name and an entry.

    Raises ConfigError for an entry that matches no name: without it a typing mistake in a list would go unnoticed.
    """
    names, entries = list(names), list(entries)
    for entry in entries:
        if not any(matches(name, entry) for name in names):
            choices = sorted({name.rpartition(".")[2] for name in names})
            listed = f"There are: {', '.join(choices[:20])}{', ...' if len(choices) > 20 else '.'}"
            raise ConfigError(f"{key}: {entry!r} matches no {what}{nearest(str(entry), choices) or '.'} {listed}")
    return [name for name in names if any(matches(name, entry) for entry in entries)]


@dataclass(frozen=True)
class BuiltIn:
    """An object by reference ("module:name"), and what is declared about it: the names of the arguments that a function reads,
    separated by spaces, or a record of facts."""

    reference: str
    reads: str = ""
    facts: Any = None


class Registry:
    """Names of one family; a lookup of an unknown name lists the names. `shared`: arguments of every function of the family, in
    addition to the ones that its BuiltIn names. `base`: a class, by reference; a user's class must have its methods; "function"
    of a family of functions."""

    def __init__(self, family: str, rows: Mapping[str, object] | None = None, *, shared: str = "", base: str = ""):
        self.family, self.shared, self.base = family, frozenset(shared.split()), base
        self._declared = {n: r.reference if isinstance(r, BuiltIn) else r for n, r in (rows or {}).items()}
        self._rows: dict[str, Any] = dict(self._declared)
        self.reads = {n: frozenset(r.reads.split()) for n, r in (rows or {}).items() if isinstance(r, BuiltIn)}
        self.facts = {n: r.facts for n, r in (rows or {}).items() if isinstance(r, BuiltIn) and r.facts is not None}
        self.built_in = tuple(self._declared)

    def reading(self, *arguments: str) -> tuple[str, ...]:
        """The built-in names with functions that read one of `arguments`, in the order of the table."""
        return tuple(n for n, reads in self.reads.items() if reads.intersection(arguments) and self.is_built_in(n))

    def may_read(self, name: str, *arguments: str) -> bool:
        """Whether the function `name` reads one of `arguments`; a user's own function may read anything."""
        return not (name in self.reads and self.is_built_in(name)) or not self.reads[name].isdisjoint(arguments)

    def declared(self, name: str) -> Any:
        """The object that this package declares for `name`, even if the registry has another one now."""
        declared = self._declared[name]
        return load_object(declared) if isinstance(declared, str) else declared

    def is_built_in(self, name: str) -> bool:
        """Whether `name` has the object that this package declares for it."""
        row = self._rows.get(name)
        if row is None or name not in self._declared or isinstance(row, str):
            return row is not None and row == self._declared.get(name)
        return row is self.declared(name)

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that adds a row. Raises NameConfigError for another object under a taken name."""

        def add(obj: T) -> T:
            taken = self._rows.get(name)
            same = taken is None or taken is obj or _origin(taken) == _origin(obj) or _names(taken, obj)
            if not same and not _is_forgotten(taken, obj):
                raise NameConfigError(f"The {self.family} {name!r} is registered already ({taken}).")
            self._rows[name] = obj
            return obj

        return add

    def get(self, name: str) -> Any:
        """The object of that name. A name with ':' is loaded as "module:object". Raises NameConfigError when unknown,
        ConfigError for an object that is none of the family."""
        row = self._rows.get(name)
        if row is None:
            if ":" in name:
                row = load_object(name)
                if self.base:
                    base = load_object(self.base) if ":" in self.base else None
                    require_kind(f"The {self.family} {name!r}", row, base)
                return row
            hint = nearest(name, self._rows) or "; there are " + ", ".join(sorted(self._rows))
            raise NameConfigError(f"There is no {self.family} {name!r}{hint}")
        if isinstance(row, str):
            require_part(row.partition(":")[0], f"The {self.family} {name!r}")
            row = load_object(row)
            self._rows[name] = row
        return row

    def set(self, name: str, obj: object) -> None:
        """Give `name` an object, in the place of any that it had."""
        self._rows[name] = obj

    def remove(self, name: str) -> None:
        """Forget `name`. Raises KeyError when it is not there."""
        del self._rows[name]

    def own_rows(self) -> dict[str, str]:
        """Name -> reference of each object that is not this package's, so that another process of the run can set it."""
        return {
            name: row if isinstance(row, str) else reference_to(row)
            for name, row in self._rows.items()
            if not self.is_built_in(name)
        }

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)


class RegistryMapping(MutableMapping[str, Any]):
    """A registry as scripts of other releases use it: an assignment, a deletion and `clear` change what runs choose from. Keys
    may be members of a string enumeration. `older` are objects of their contract in place of built-in rows."""

    def __init__(self, registry: Registry, older: Mapping[str, object] | None = None):
        self._registry, self._older = registry, older or {}

    def __getitem__(self, name: str) -> Any:
        """Raises NameConfigError (a KeyError and a ValueError) with the nearest names."""
        key = _plain(name)
        row = self._registry.get(key)
        return self._older[key] if key in self._older and self._registry.is_built_in(key) else row

    def __setitem__(self, name: str, row: Any) -> None:
        self._registry.set(_plain(name), row)

    def __delitem__(self, name: str) -> None:
        self._registry.remove(_plain(name))

    def __contains__(self, name: object) -> bool:
        return _plain(name) in self._registry

    def __iter__(self) -> Iterator[str]:
        return iter(self._registry)

    def __len__(self) -> int:
        return len(self._registry)

    def copy(self) -> dict[str, object]:
        """The rows as a dict; `update` puts them back."""
        return {name: self._registry.get(name) for name in self}

    def replace(self, rows: Mapping[str, object]) -> None:
        """Have only `rows`."""
        rows = dict(rows)
        self.clear()
        self.update(rows)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self)})"


def _plain(name: object) -> Any:
    return getattr(name, "value", name)
