"""Model families: the table in docs/families.md is complete, and true for every family (slow)."""

from pathlib import Path

import pytest

from tests.run import families

pytestmark = pytest.mark.seed("B1")
PAGE = Path(__file__).resolve().parents[2] / "docs/families.md"


def test_the_page_has_every_family():
    assert list(families.read_page(PAGE)) == list(families.FAMILIES)


@pytest.mark.slow
@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_family_loads_and_trains_as_the_page_says(family, tmp_path):
    overrides = families.write_task(tmp_path)
    found = families.examine(family, tmp_path / family, overrides)
    assert (found.class_name, found.forward) == vars_of(families.read_page(PAGE)[family])


def vars_of(row):
    return row.class_name, row.forward
