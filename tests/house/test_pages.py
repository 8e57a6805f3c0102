"""Commands of the task pages end, pages in a row share no run folder, and each block says what it is."""

import json
import re

import pytest
import yaml

from tests.house.source import ROOT

PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^verl (train|rejection)\b((?:\\\n|[^\n])*)", re.MULTILINE)
FOLDER = re.compile(r"(?:trainer\.default_local_dir=|output_dir=\"|session\.save\(\")(runs/[\w/-]+)")


def blocks(page):
    return [code for _, code in BLOCK.findall(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if COMMAND.search("\n".join(blocks(page)))], ids=lambda p: p.stem
)
def test_a_command_says_where_it_ends(page):
    commands = [match[0] for code in blocks(page) for match in COMMAND.finditer(code)]
    assert not [c for c in commands if "total_training_steps=" not in c and "--dry-run" not in c]


def test_each_page_has_run_folders_of_its_own():
    folders = {}
    for page in PAGES:
        for folder in {name for code in blocks(page) for name in FOLDER.findall(code)}:
            folders.setdefault(folder, []).append(page.name)
    assert len(folders) > 20
    assert not {folder: pages for folder, pages in folders.items() if len(pages) > 1}


ANY_BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
READ_AS = {
    "json": json.loads,
    "yaml": yaml.safe_load,
    "mermaid": str,
    "math": str,
    "text": str,
    "bash": str,
    "sh": str,
    "toml": str,
    "python": str,
}


@pytest.mark.parametrize(
    "page",
    [*PAGES, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md"))],
    ids=lambda p: p.stem,
)
def test_each_block_says_what_it_is(page):
    """`sh` and `python` of a task page run (tests/examples/test_pages.py), `bash` needs a network, a browser, GPUs or hours."""
    every = ANY_BLOCK.findall(page.read_text(encoding="utf-8"))
    assert {language for language, _ in every} <= set(READ_AS)
    for language, code in every:
        READ_AS[language](code)
