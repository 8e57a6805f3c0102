"""Import of the modules that verl/compat/import_paths.py lists; `import verl` installs it."""

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from verl.cli.machine.requirements import imported
from verl.compat.import_paths import COMMANDS, FURTHER_NAMES, IMPORT_PATHS
from verl.compat.replaced import SENTENCES, ReplacedModuleError, ReplacedNameError, sentence_of


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
# so that the import of a module below asks the finder, which has a sentence
IS_PACKAGE |= {parent: True for name in SENTENCES if (parent := name.rpartition(".")[0]) in IS_PACKAGE}
_BODY = str(Path(__file__).with_name("module.py"))


class _Extended(SourceFileLoader):
    """Runs a file of this package; names of the table that the file lacks resolve too."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        names = names_of(module.__name__)
        module.__dict__["__getattr__"] = lambda name: resolve(module.__name__, name, names)


class CompatibilityFinder:
    """Meta path finder: a listed module without its own file gets the code of verl/compat/module.py. It stands first, since an
    empty folder left by an older checkout would otherwise be found as a namespace package."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of a listed module, from its own file if there is one; None for any other module. Raises ReplacedModuleError
        for a module that something else replaces here."""
        if name not in IS_PACKAGE and name not in FURTHER_NAMES:
            if sentence := sentence_of(name):
                raise ReplacedModuleError(name, sentence)
            return None
        file = PathFinder.find_spec(name, path)
        if file is not None and file.origin is not None:
            if name in FURTHER_NAMES and isinstance(file.loader, SourceFileLoader):
                file.loader = _Extended(name, file.origin)
            return file
        from importlib.util import spec_from_file_location

        if name in FURTHER_NAMES:
            return None
        folders = [str(Path(parent, name.rpartition(".")[2])) for parent in path or ()]
        return spec_from_file_location(name, _BODY, submodule_search_locations=folders if IS_PACKAGE[name] else None)


def install() -> None:
    if CompatibilityFinder not in sys.meta_path:
        sys.meta_path.insert(0, CompatibilityFinder)  # the class itself has find_spec


class CompatibilityModule(ModuleType):
    """A listed module. Assigning a mapping to the name of a registry gives the registry these rows, and assigning the
    registry again gives back the rows that it had, as `unittest.mock.patch` does."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as its name, so functions that hold it reach the processes of Ray."""
        return importlib.import_module, (self.__name__,)

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
    for source, names in {**IMPORT_PATHS, **FURTHER_NAMES}.get(module, {}).items():
        for entry in names.split():
            name, _, target = entry.partition("=")
            origins[name] = (source, target or name)
    return origins


def resolve(module: str, name: str, names: dict[str, tuple[str, str]]) -> Any:
    """The object or submodule `name` of a listed module. Raises ReplacedNameError for a name that something else replaces here,
    and AttributeError for any other name."""
    if name in names:
        source, target = names[name]
        return getattr(imported(source), target)
    if f"{module}.{name}" in IS_PACKAGE:
        return imported(f"{module}.{name}")
    if name[:2] != "__" and (sentence := sentence_of(f"{module}:{name}")):
        raise ReplacedNameError(f"{module} has no {name!r} here. {sentence}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def run(module: str, arguments: Sequence[str]) -> int:
    """The exit code of `python -m module arguments`; a module that is no command does nothing."""
    if module not in COMMANDS:
        return 0
    source, _, function = COMMANDS[module].partition(":")
    return cast("int", getattr(importlib.import_module(source), function)(arguments))
