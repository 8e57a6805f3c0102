"""benchmarks/safety_cost.py: both sides train the same, and the conclusions from their seconds."""

import child_safety
import pytest
import safety_cost
import torch
from child_safety import PARTS, functions, hold
from peers_cpu import make_workload
from report import Report
from safety_cost import conclude


def pair(on, off, ledger=0.0, grad_norm=1.0):
    parts = {"ledger": ledger, "guards": 0.001, "heartbeat": 0.0, "ledger's thread": 0.002}
    return {
        "on": {"step_s": on, "parts": parts, "actor/grad_norm": grad_norm},
        "off": {"step_s": off, "actor/grad_norm": 1.0},
    }


def test_what_is_concluded():
    # a host that becomes slower does so for both
    report = conclude(Report("cost"), [pair(1.02, 1.0, 0.01), pair(2.04, 2.0, 0.01), pair(4.08, 4.0, 0.01, 2.0)])
    found = report.results
    assert (found["cost"], found["error"]) == (pytest.approx(0.02), pytest.approx(0.0))
    assert found["shares"]["ledger"] == pytest.approx(0.03 / 7.14)
    assert found["account"] == pytest.approx(0.039 / 7.14)
    text = report.text()
    assert "1.0200 ± 0.0000" in text
    assert "equal to the last bit in 2 of 3" in text


def test_the_error_is_that_of_a_median():
    found = conclude(Report("cost"), [pair(1.0 + d, 1.0) for d in (-0.02, 0.0, 0.02)]).results
    assert found["cost"] == pytest.approx(0.0)
    assert found["error"] == pytest.approx(1.2533 * 0.02 / 3**0.5, rel=1e-3)


@pytest.mark.parametrize("argv", [["--pairs", "1"], ["--off", "everything"]])
def test_arguments_that_measure_nothing(argv):
    with pytest.raises(SystemExit):
        safety_cost._parse(argv)


class Commands:
    """A parent that wants step after step."""

    def __init__(self):
        self.answers = []

    def next(self):
        return "step", {}

    def reply(self, result=None):
        self.answers.append(result)


def options(tiny_work):
    kept = [o for at, o in enumerate(tiny_work) if o != "--rounds" and tiny_work[at - 1] != "--rounds"]
    return safety_cost._parse([*kept, "--pairs", "2"])


def test_both_sides_do_the_same_work_and_one_of_them_does_more(tiny_work, tmp_path):
    work = make_workload(options(tiny_work), 2).to_json()
    found = {}
    before = torch.are_deterministic_algorithms_enabled()
    try:
        for name, without in (("on", ()), ("off", PARTS)):
            torch.use_deterministic_algorithms(False)
            commands = Commands()
            hold(commands, work, str(tmp_path / name), [], without)
            found[name] = commands.answers[1:]
            assert torch.are_deterministic_algorithms_enabled() == (name == "on")
    finally:
        torch.use_deterministic_algorithms(before, warn_only=True)
    on, off = found["on"], found["off"]
    same = child_safety._SAME
    assert [[step[name] for name in same] for step in on] == [[step[name] for name in same] for step in off]
    assert len(on) == 2
    assert all(seconds > 0 for step in on for seconds in step["parts"].values())
    assert all(sum(step["parts"].values()) < step["step_s"] for step in on)
    assert all(step["parts"]["ledger"] < 0.1 * on[0]["parts"]["ledger"] for step in off)
    assert off[0]["parts"]["ledger's thread"] == 0


def test_every_function_of_the_account_is_there():
    names = {(part, name) for part, _, name in functions()}
    assert {part for part, _ in names} == {"ledger", "guards", "heartbeat"}
    assert {("ledger", "train"), ("ledger", "segments_of"), ("guards", "__call__"), ("guards", "random_state")} <= names


@pytest.mark.slow
def test_two_processes_in_turns(tiny_work, tmp_path):
    """pytest -m slow tests/benchmarks/test_safety_cost.py"""
    report = safety_cost.measure(options(tiny_work))
    assert len(report.results["seconds"]["on"]) == 2
    assert report.results["shares"]["guards"] > 0
    assert "equal to the last bit in 2 of 2" in report.text()
