"""Commands of the task pages end, and pages in a row share no run folder."""

import re

import pytest

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
