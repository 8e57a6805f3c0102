"""The package's source as the guards see it: its files, parsed once, and their imports."""

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

from verl.parallel.process_settings import without_collection

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "verl"


@dataclass(frozen=True)
class Import:
    module: str  # dotted; for `from a import b` it is "a.b" where that is a module of ours, else "a"
    line: int
    for_types_only: bool = False  # under `if TYPE_CHECKING`


@functools.cache
def files() -> dict[str, Path]:
    """Dotted name -> file, for every module of the package."""
    modules = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


@functools.cache
def tree(path: Path) -> ast.Module:
    with without_collection():  # which would take three quarters of the time
        return ast.parse(path.read_text(encoding="utf-8"), str(path))


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file. A walk takes as long as parsing, and some twenty tests look at every file."""
    return tuple(ast.walk(tree(path)))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def package_of(name: str) -> str:
    """The folder or file directly below verl: "models", "errors"; "" for verl itself."""
    return (name.split(".") + [""])[1]


@functools.cache
def imports(name: str) -> tuple[Import, ...]:
    """All imports of a module, those inside functions included."""
    path = files()[name]
    typing_only = {
        id(inner)
        for node in nodes(path)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    targets = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            targets += [Import(alias.name, node.lineno, id(node) in typing_only) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: write imports with their full name"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                target = full if full in files() else str(node.module)
                targets.append(Import(target, node.lineno, id(node) in typing_only))
    return tuple(targets)
