"""Test files that start no process and no run, found by the names that they and their helpers use: `make test-fast`."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent
STARTS = re.compile(
    r"\b(subprocess|multiprocessing|forked|Popen|psutil|fork|uvicorn|train_run|\w*[Ss]andbox\w*|RewardPool"
    r"|verl\.(run\.host|api|cli\.main|data\.scan|trainer|rewards\.(pool|programs)))\b"
)


def is_unit(file: Path) -> bool:
    """Whether no test of `file` starts a process or a run, by its own text, its helpers in tests/ and its fixtures."""
    if file.parent.name == "house":
        return True
    starts = any(STARTS.search(f.read_text(encoding="utf-8")) for f in _with_helpers(file))
    return not (starts or _names(file) & _starting_fixtures(file.parent))


def _with_helpers(file: Path) -> set[Path]:
    """`file` and the files of tests/ that it imports, directly or not, but for conftest files, whose fixtures it asks for."""
    helpers, pending = set(), [file]
    while pending:
        file = pending.pop()
        if file not in helpers:
            helpers.add(file)
            pending += [helper for helper in _imported(_tree(file)) if helper.name != "conftest.py"]
    return helpers


def _imported(tree: ast.AST) -> Iterator[Path]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests"):
            folder = TESTS.parent / node.module.replace(".", "/")
            yield from (
                f for f in [folder.with_suffix(".py"), *(folder / f"{a.name}.py" for a in node.names)] if f.is_file()
            )


@functools.cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _names(file: Path) -> set[str]:
    """Parameters of functions, and texts, which may name fixtures too (`usefixtures`)."""
    nodes = list(ast.walk(_tree(file)))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {node.arg for node in nodes if isinstance(node, ast.arg)} | texts


@functools.cache
def _starting_fixtures(folder: Path) -> frozenset[str]:
    """Functions of the conftest files that apply in `folder` which start something, or ask for one that does."""
    starting = frozenset() if folder == TESTS else _starting_fixtures(folder.parent)
    if (conftest := folder / "conftest.py").is_file():
        text = conftest.read_text(encoding="utf-8")
        for node in _tree(conftest).body:
            if isinstance(node, ast.FunctionDef):
                texts = [ast.get_source_segment(text, node) or "", *(f.read_text("utf-8") for f in _imported(node))]
                if any(map(STARTS.search, texts)) or {argument.arg for argument in node.args.args} & starting:
                    starting |= {node.name}
    return starting
