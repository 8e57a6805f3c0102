"""Links between the pages lead to files and headings that are there, and the README leads to every page.

The site (docs/conf.py) takes its navigation from the README's table, and its links from the pages.
"""

import re

import pytest

from tests.house.source import ROOT

PAGES = sorted(
    page
    for folder in ("", "docs", "docs/config", "docs/history", "examples", "examples/clusters", "benchmarks")
    for page in (ROOT / folder).glob("*.md")
)
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
        if not target.is_file() or (link["heading"] and link["heading"] not in headings(target)):
            dead.append(link[0])
    assert not dead, f"{page.name} links to {dead}"


def test_the_readme_leads_to_every_page_once():
    """A page that is not in its table is not in the navigation of the site."""
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("## Pages")[1].split("\n\n")[1]
    listed = sorted(link["path"] for link in LINK.finditer(table))
    pages = {page.relative_to(ROOT).as_posix() for page in PAGES} - {"README.md"}
    assert listed == sorted(pages)
