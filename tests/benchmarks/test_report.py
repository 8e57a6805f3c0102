"""Medians, spreads and ratios, and how they are shown."""

import json

import pytest
from report import Report, Series, number, plain, ratio, series_of, table


def test_median_and_spread():
    series = Series((10.0, 12.0, 11.0))
    assert series.median == 11.0
    assert series.spread == pytest.approx(2 / 11)
    assert series.text("s") == "11.0 s ±9%"


def test_ratio_is_of_the_medians_baseline_over_ours():
    assert ratio(Series((9.0, 90.0, 10.0)), Series((2.0, 2.5, 2.5))) == 4.0
    assert ratio(Series((1.0,)), Series((0.0,))) == float("inf")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.000"),
        (0.25, "0.250"),
        (1.234, "1.23"),
        (12.34, "12.3"),
        (1234.5, "1,234"),
        (0.01, "0.01"),
        (1e-5, "1.00e-05"),
    ],
)
def test_numbers(value, text):
    assert number(value) == text


def test_table_aligns():
    lines = table(["phase", "verl"], [["generate", "1.00 s"], ["train", "12.0 s"]]).splitlines()
    assert lines == ["phase       verl", "--------  ------", "generate  1.00 s", "train     12.0 s"]


def test_facts_are_plain():
    assert plain({"a": 1, "b": {"c": "x"}}) == "a 1, b c x"


def test_report_as_text_and_json(tmp_path, capsys):
    report = Report("Title", facts={"workload": "w"}, results={"x": series_of([{"s": 1}, {"s": 3}], "s").to_json()})
    report.tables.append((["a", "b"], [["1", "2"]]))
    report.notes.append("A note.")
    report.finish(tmp_path / "out" / "r.json")
    printed = capsys.readouterr().out
    assert "Title" in printed
    assert "A note." in printed
    saved = json.loads((tmp_path / "out" / "r.json").read_text())
    assert saved["results"]["x"] == {"median": 2.0, "spread": 1.0, "values": [1.0, 3.0]}
    assert saved["machine"]["cores"] >= 1
    assert "torch" in saved["machine"]["versions"]
