"""The generated rows, the fit and the table of benchmarks/scale.py."""

import pytest

from benchmarks.scale import Costs, exponent, write_rows
from tests.data.rows import config
from tests.house.source import ROOT
from verl.data.dataset import load_dataset
from verl.models.tiny import make_tokenizer
from verl.registry import load_module


def test_rows_can_train(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.scale._ROWS_WRITTEN", 8)
    write_rows(tmp_path / "a.parquet", 20)
    rows = load_dataset(str(tmp_path / "a.parquet"), make_tokenizer(), config(max_prompt_length=256))
    assert len(rows) == 20
    assert rows.data_sources == ["sums"]
    assert rows[19]["raw_prompt"][0]["content"].startswith("What is 19 + 133?")
    assert rows[19]["reward_model"] == {"style": "rule", "ground_truth": "152"}


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_exponents(power):
    sizes = (1_000, 20_000, 400_000)
    assert exponent(sizes, [3 * size**power for size in sizes]) == pytest.approx(power)


def test_the_table_has_a_row_for_each_quantity():
    costs = Costs((10, 1000))
    costs.rows |= {"seconds": [2.0, 20.0], "memory (GB)": [0.5, 5.0]}
    lines = costs.table().splitlines()
    assert lines[0] == "| | 10 | 1,000 | exponent |"
    assert lines[2:] == ["| seconds | 2 | 20 | 0.50 |", "| memory (GB) | 0.5 | 5 | 0.50 |"]


def test_the_picture_is_of_the_tables():
    generator = load_module(str(ROOT / "docs" / "make_scale.py"))
    assert generator.DOCUMENT.with_suffix(".svg").read_text() == generator.picture(generator.DOCUMENT.read_text())
