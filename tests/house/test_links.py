"""Links between the pages lead to files and headings that are there."""

import re

import pytest

from tests.house.source import ROOT

PAGES = sorted(page for folder in ("", "docs", "examples", "benchmarks") for page in (ROOT / folder).glob("*.md"))
LINK = re.compile(r"\]\((?!https?:|mailto:)(?P<path>[^)#\s]*)#?(?P<heading>[^)\s]*)")


def headings(page):
    """The headings of a page as its links name them."""
    lines = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", line.lower()).strip().replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    dead = []
    for link in LINK.finditer(page.read_text(encoding="utf-8")):
        target = page.parent / link["path"] if link["path"] else page
        if not target.exists() or (link["heading"] and link["heading"] not in headings(target)):
            dead.append(link[0])
    assert not dead, f"{page.name} links to {dead}"
