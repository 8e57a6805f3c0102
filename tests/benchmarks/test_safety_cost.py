"""benchmarks/safety_cost.py: both sides train the same; and what is concluded from their seconds."""

import pytest
import safety_cost
import torch
from report import Report
from safety_cost import PARTS, conclude, step_seconds


def test_the_cost_is_that_of_the_same_steps():
    found = {"on": [[1.1, 2.06], [1.0, 2.0], [1.02, 2.04]], "off": [[1.0, 2.0], [1.0, 2.0], [1.0, 9.0]]}
    report = conclude(Report("cost"), found)
    assert report.results["ratios"] == pytest.approx([1.02, 1.02])
    assert report.results["cost"] == pytest.approx(0.02)
    assert "on / off: 1.0200" in report.text()
    assert "step 2" in report.text()


def test_the_first_step_does_not_count():
    rows = [{"step": step, "time": 10.0 + step**2} for step in range(4)]
    assert step_seconds(rows) == [3.0, 5.0]


@pytest.mark.parametrize("argv", [["--steps", "2"], ["--rounds", "0"], ["--off", "everything"]])
def test_arguments_that_measure_nothing(argv):
    with pytest.raises(SystemExit):
        safety_cost._parse(argv)


def test_both_sides_do_the_same_work(tiny_work, tmp_path, monkeypatch):
    runs = []
    original = safety_cost.train
    monkeypatch.setattr(safety_cost, "train", lambda *a: runs.append(original(*a)) or runs[-1])
    before = torch.are_deterministic_algorithms_enabled()
    try:
        arguments = safety_cost._parse([*tiny_work, "--steps", "3", "--json", str(tmp_path / "r.json")])
        report = safety_cost.measure(arguments)
    finally:
        torch.use_deterministic_algorithms(before, warn_only=True)
    on, off = runs
    assert [row["actor/grad_norm"] for row in on] == [row["actor/grad_norm"] for row in off]
    assert [row["critic/score/mean"] for row in on] == [row["critic/score/mean"] for row in off]
    assert [row["training/next_ordinal"] for row in on] == [row["training/next_ordinal"] for row in off] == [2, 4, 6]
    assert "actor/guard/ratio" in on[0]
    assert "actor/guard/ratio" not in off[0]
    assert set(report.facts["off"].split(", ")) == set(PARTS)
    assert len(report.results["ratios"]) == 2
