"""The file map is complete, the generated pages are current, and what the documents point to exists."""

import ast
import re

import pytest

from tests.house.source import ROOT, files, relative, tree

MAP = ROOT / "docs" / "architecture.md"
# one line a file: "- `verl/x/y.py`: what it holds", or a table row "| `verl/x/y.py` | what it holds |"
MAP_LINE = re.compile(r"^\s*[-*|]\s*`(?P<path>[\w./-]+\.\w+)`")
LINK = re.compile(r"\]\((?!https?:|#|mailto:)(?P<path>[^)#\s]+)")


def mapped() -> list[str]:
    return [m["path"] for line in MAP.read_text().splitlines() if (m := MAP_LINE.match(line))]


def has_own_code(path) -> bool:
    """An __init__.py that is empty, or only describes and hands on, needs no line."""
    if path.name != "__init__.py":
        return True
    plain = (ast.Import, ast.ImportFrom, ast.Expr, ast.Assign)
    return any(not isinstance(node, plain) for node in tree(path).body)


def suggestion(path) -> str:
    first = (ast.get_docstring(tree(path)) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
    return f"| `{relative(path)}` | {first} |"


def test_every_file_has_a_line_in_the_map():
    assert MAP.is_file(), "docs/architecture.md is missing"
    missing = [path for path in files().values() if has_own_code(path) and relative(path) not in mapped()]
    lines = "\n".join(map(suggestion, missing))
    assert not missing, f"{len(missing)} files have no line in docs/architecture.md:\n{lines}"


def test_every_line_of_the_map_is_a_file():
    assert MAP.is_file(), "docs/architecture.md is missing"
    gone = [path for path in mapped() if not (ROOT / path).is_file()]
    twice = {path for path in mapped() if mapped().count(path) > 1}
    assert not gone, f"docs/architecture.md has lines for files that are gone: {gone}"
    assert not twice, f"docs/architecture.md has more than one line for: {sorted(twice)}"


@pytest.mark.parametrize(
    "page",
    sorted(
        p.relative_to(ROOT).as_posix()
        for p in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.md")]
    ),
)
def test_links_lead_somewhere(page):
    file = ROOT / page
    dead = [m["path"] for m in LINK.finditer(file.read_text()) if not (file.parent / m["path"]).exists()]
    assert not dead, f"{page} links to {dead}"


def test_paths_in_the_contributing_guide_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`((?:verl|tests|docs|examples)/[\w./]+)`", text))
    gone = sorted(path for path in named if not (ROOT / path).exists())
    assert named, "the guide names no file"
    assert not gone, f"CONTRIBUTING.md names {gone}"
