"""The list of files, docs/files.md: `python docs/make_files.py`.

One table per folder with one line per file, the first sentence of the file's docstring.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "files.md"
HEAD = """# Files

Written by `python docs/make_files.py`; [architecture.md](architecture.md) explains how the parts work together.
"""


def described_files() -> list[Path]:
    """Every file of the package but `__init__.py` files that say nothing, by folder."""
    files = [
        f for f in (ROOT / "verl").rglob("*.py") if f.name != "__init__.py" or f.read_text(encoding="utf-8").strip()
    ]
    return sorted(files, key=lambda f: (f.parent.relative_to(ROOT).parts, f.name))


def first_sentence(file: Path) -> str:
    """The first sentence of the docstring, without its full stop. Raises ValueError when there is no docstring."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    if not text:
        raise ValueError(f"{file.relative_to(ROOT)} has no docstring; its first sentence goes into {PAGE.name}.")
    paragraph = " ".join(text.split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.])\s+(?=[A-Z`])", paragraph)[0]
    return sentence.rstrip(".").replace("|", "\\|")


def file_tables() -> str:
    """A table for each folder."""
    lines: list[str] = []
    folder = None
    for file in described_files():
        if file.parent != folder:
            folder = file.parent
            lines += ["", f"## `{folder.relative_to(ROOT).as_posix()}/`", "", "| file | what it is |", "|---|---|"]
        lines.append(f"| `{file.relative_to(ROOT).as_posix()}` | {first_sentence(file)} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page as it should be."""
    return f"{HEAD}{file_tables()}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
