"""Model families: the table in docs/families.md is complete, and true for every family (slow)."""

from pathlib import Path

import pytest

from tests.run import families
from verl.models.padded import KINDS
from verl.parallel.device import CPU_BF16

pytestmark = pytest.mark.seed("B1")
PAGE = Path(__file__).resolve().parents[2] / "docs/families.md"


def test_the_page_is_written_from_the_tables():
    rows = families.read_page(PAGE)
    assert PAGE.read_text("utf-8") == families.page([rows[family] for family in families.FAMILIES])


@pytest.mark.parametrize("multiplied", ["native", "widened"])
def test_mamba_trains_in_bfloat16_with_its_float32_residual(multiplied, tmp_path, monkeypatch):
    monkeypatch.setenv(CPU_BF16, multiplied)
    families.build("mamba", tmp_path / "mamba")
    families.trained_steps(tmp_path / "mamba", families.write_task(tmp_path), "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_family_loads_and_trains_as_the_page_says(family, tmp_path):
    overrides = families.write_task(tmp_path)
    row = families.examine(family, tmp_path / family, overrides)
    assert vars_of(row) == vars_of(families.read_page(PAGE)[family])


def vars_of(row):
    return row.class_name, row.forward, row.note if row.forward in KINDS else ""
