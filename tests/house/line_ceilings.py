"""Ceilings of the number of lines, which only fall: `python -m tests.house.line_ceilings` lowers each to its count.

It runs before a merge. `--raise` also sets those that their count exceeds; the commit says `Capability:` and why.
`--statements` prints the number of statements of each part, for the table in CONTRIBUTING.md.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from verl.distributions import CORE, owner_of

ROOT = Path(__file__).resolve().parents[2]
FILE = "tests/house/test_style.py"
TABLE = re.compile(r"^MAX_LINES = \{\n[^}]*^\}", re.MULTILINE)


def part_of(path: Path) -> str:
    """`core`, another distribution (`page` of verl-page), or the folder at the root of the tree: the ceiling that a file counts
    for."""
    place = path.relative_to(ROOT)
    if place.parts[0] != "verl":
        return place.parts[0]
    distribution = owner_of(".".join(place.with_suffix("").parts))
    return "core" if distribution == CORE else distribution.removeprefix(f"{CORE}-")


def num_lines(text: str) -> int:
    return len(text.splitlines())


def num_statements(text: str) -> int:
    return sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text)))


def counts(size: Callable[[str], int] = num_lines) -> dict[str, int]:
    """The size of the Python of each part."""
    sizes: Counter[str] = Counter()
    for folder in ("verl", "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            sizes[part_of(path)] += size(path.read_text(encoding="utf-8"))
    return dict(sizes)


def ceilings(text: str) -> dict[str, int]:
    """The table in the text of FILE."""
    table = TABLE.search(text)
    return {name: int(lines) for name, lines in re.findall(r'"(\w+)": ([\d_]+)', table[0])} if table else {}


def moved(text: str, count: dict[str, int], may_rise: bool) -> str:
    """`text` with each ceiling at its count if that is lower, and with `may_rise` also if it is higher."""
    table = {name: count[name] if may_rise else min(limit, count[name]) for name, limit in ceilings(text).items()}
    rows = "".join(f'    "{name}": {limit:_},\n' for name, limit in table.items())
    return TABLE.sub(f"MAX_LINES = {{\n{rows}}}", text)


def unexplained_rises() -> list[str]:
    """Commits that raise a ceiling where no commit since its last change says `Capability:`."""

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    changes = git("log", "--reverse", "--format=%H", '-G^ +"[a-z]+": [0-9_]+,$', "--", FILE).split()
    wrong = []
    for before, commit in zip(changes, changes[1:], strict=False):
        old, new = (ceilings(git("show", f"{revision}:{FILE}")) for revision in (before, commit))
        higher = {name: limit for name, limit in new.items() if limit > old.get(name, limit)}
        if higher and "Capability:" not in git("log", "--format=%B", f"{before}..{commit}"):
            wrong.append(f"{commit[:8]} raises {higher}")
    return wrong


def main() -> None:
    if "--statements" in sys.argv[1:]:
        print("\n".join(f"| {part} | {size:,} |" for part, size in counts(num_statements).items()))
        return
    path = ROOT / FILE
    text = path.read_text(encoding="utf-8")
    new = moved(text, counts(), "--raise" in sys.argv[1:])
    for name, limit in ceilings(new).items():
        if limit != ceilings(text)[name]:
            print("raised" if limit > ceilings(text)[name] else "lowered", name, ceilings(text)[name], "->", limit)
    path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
