"""The page docs/seed_features.md: `python docs/make_seed_features.py`.

Rows come from docs/seed_features.yaml, and the tests that show them from their markers `@pytest.mark.seed("A1", ...)`.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
ROWS, PAGE = ROOT / "docs" / "seed_features.yaml", ROOT / "docs" / "seed_features.md"
HEAD = """# Features of the seed documents

The seed documents are four articles about HybridFlow and verl; the letters and numbers of their features are in this table.
Their numbers come from other machines and models: read what they compare, not what to expect. Ours come from two processor
cores, by [benchmarks.md](benchmarks.md) or the tests next to them. Run a test with `pytest -m "slow or not slow" PATH`.
`python docs/make_seed_features.py` writes this page.

| row | feature | shown by | their number | ours |
|---|---|---|---|---|
"""


def marked() -> dict[str, list[str]]:
    """Row -> the tests that carry its marker, as file or file::test."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        name = file.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                places, marks = f"{name}::{node.name}", node.decorator_list
            elif isinstance(node, ast.Assign) and any(getattr(t, "id", "") == "pytestmark" for t in node.targets):
                places, marks = name, [node.value]
            else:
                continue
            for row in (row for mark in marks for row in _rows_of(mark)):
                found[row].append(places)
    return found


def _rows_of(mark: ast.AST) -> list[str]:
    return [
        argument.value
        for call in ast.walk(mark)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "seed"
        for argument in call.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    ]


def rows() -> dict[str, dict[str, Any]]:
    """The rows of the YAML file."""
    found: dict[str, dict[str, Any]] = yaml.safe_load(ROWS.read_text(encoding="utf-8"))
    return found


def page() -> str:
    """The page as it should be."""
    tests = marked()
    lines = []
    for name, row in rows().items():
        shown = [f"`{test}`" for test in tests.get(name, [])]
        shown += [f"`{row['benchmark']}`"] if "benchmark" in row else []
        shown += [f"**open**: {row['open']}"] if "open" in row else []
        lines.append(f"| {name} | {row['asks']} | {', '.join(shown)} | {row.get('seed', '')} | {row.get('ours', '')} |")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
