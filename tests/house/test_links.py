"""Links between the pages lead to files that are there."""

import re

import pytest

from tests.house.source import ROOT

PAGES = sorted(page for folder in ("", "docs", "examples", "benchmarks") for page in (ROOT / folder).glob("*.md"))
LINK = re.compile(r"\]\((?!https?:|#|mailto:)(?P<path>[^)#\s]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    dead = [m["path"] for m in LINK.finditer(page.read_text()) if not (page.parent / m["path"]).exists()]
    assert not dead, f"{page.name} links to {dead}"
