"""Import of the modules that verl/compat/import_paths.py lists; `import verl` installs it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from verl.cli.machine.requirements import imported
from verl.compat.import_paths import COMMANDS, IMPORT_PATHS


def _with_parents(modules: Sequence[str]) -> dict[str, bool]:
    """Each module and each package above it -> whether it is a package."""
    packages = dict.fromkeys(modules, False)
    for module in modules:
        parent = module.rpartition(".")[0]
        while parent != "verl":
            packages[parent] = True
            parent = parent.rpartition(".")[0]
    return packages


IS_PACKAGE = _with_parents([*IMPORT_PATHS, *COMMANDS])
_BODY = str(Path(__file__).with_name("module.py"))


class CompatibilityFinder:
    """Meta path finder: a listed module without its own file gets the code of verl/compat/module.py. It stands first, since an
    empty folder left by an older checkout would otherwise be found as a namespace package."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of a listed module, from its own file if there is one; None for any other module."""
        if name not in IS_PACKAGE:
            return None
        file = PathFinder.find_spec(name, path)
        if file is not None and file.origin is not None:
            return file
        from importlib.util import spec_from_file_location

        folders = [str(Path(parent, name.rpartition(".")[2])) for parent in path or ()]
        return spec_from_file_location(name, _BODY, submodule_search_locations=folders if IS_PACKAGE[name] else None)


def install() -> None:
    if CompatibilityFinder not in sys.meta_path:
        sys.meta_path.insert(0, CompatibilityFinder)  # the class itself has find_spec


class CompatibilityModule(ModuleType):
    """A listed module. Assigning a mapping to the name of a registry gives the registry these rows, and assigning the
    registry again gives back the rows that it had, as `unittest.mock.patch` does."""

    def __setattr__(self, name: str, value: Any) -> None:
        from verl.registry import RegistryMapping

        current = self.__dict__.get(name)
        if not isinstance(current, RegistryMapping):
            super().__setattr__(name, value)
        elif value is not current:
            self.__dict__[f"_{name}_before"] = current.copy()
            current.replace(value)
        elif (before := self.__dict__.pop(f"_{name}_before", None)) is not None:
            current.replace(before)


def names_of(module: str) -> dict[str, tuple[str, str]]:
    """Name in a listed module -> (module here, name there)."""
    origins = {}
    for source, names in IMPORT_PATHS.get(module, {}).items():
        for entry in names.split():
            name, _, target = entry.partition("=")
            origins[name] = (source, target or name)
    return origins


def resolve(module: str, name: str, names: dict[str, tuple[str, str]]) -> Any:
    """The object or submodule `name` of a listed module. Raises AttributeError for any other name."""
    if name in names:
        source, target = names[name]
        return getattr(imported(source), target)
    if f"{module}.{name}" in IS_PACKAGE:
        return imported(f"{module}.{name}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def run(module: str, arguments: Sequence[str]) -> int:
    """The exit code of `python -m module arguments`; a module that is no command does nothing."""
    if module not in COMMANDS:
        return 0
    source, _, function = COMMANDS[module].partition(":")
    return cast("int", getattr(importlib.import_module(source), function)(arguments))
