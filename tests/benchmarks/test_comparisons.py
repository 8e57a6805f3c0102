"""Conclusions of the scripts from answers, and their refusals to compare."""

import peers_cpu
import pytest
import rollout_cpu
from peers_cpu import TRL_FORMS, Unequal, check_equal, fill, typed
from report import Report
from workload import Workload


def answer(**changes):
    same = {"prompts": "d", "num_sequences": 8, "shortest": 6, "longest": 6, "weight_change": 0.5}
    times = {"generate_s": 1.0, "train_s": 2.0, "step_s": 3.5, "processor_s": 3.0, "cpu_before_s": 1.0, "cpu_s": 4.0}
    return {**same, **times, "peak_rss_bytes": 10, "children_peak_rss_bytes": 2, **changes}


class FakePeer:
    def __init__(self, name, log, **changes):
        self.name, self.log, self.changes = name, log, changes

    def ask(self, command, limit_s, **arguments):
        self.log.append((self.name, command, arguments.get("step")))
        return answer(**self.changes)


def test_equal_work_is_accepted():
    check_equal({"verl": answer(), "trl": answer(step_s=99.0)})


@pytest.mark.parametrize("changes", [{"prompts": "other"}, {"num_sequences": 7}, {"shortest": 5}, {"longest": 7}])
def test_different_work_is_refused(changes):
    with pytest.raises(Unequal, match="different work"):
        check_equal({"verl": answer(), "trl": answer(**changes)})


def test_weights_that_stand_still_are_refused():
    with pytest.raises(Unequal, match="The weights of trl did not change"):
        check_equal({"verl": answer(), "trl": answer(weight_change=0.0)})


def test_rounds_alternate_and_the_first_does_not_count():
    log = []
    peers = [FakePeer("verl", log), FakePeer("trl", log)]
    answers = peers_cpu.alternate(peers, 2, 10.0)
    assert [name for name, _, _ in log] == ["verl", "trl", "trl", "verl", "verl", "trl"]
    assert {name: [step["processor_s"] for step in rounds] for name, rounds in answers.items()} == {
        "verl": [3.0, 3.0], "trl": [3.0, 3.0],
    }  # fmt: skip


def test_ratios_are_the_peer_s_time_over_ours():
    report = Report("t")
    ours = [answer(), answer(step_s=4.5)]
    trl = [answer(step_s=8.0, peak_rss_bytes=34), answer(step_s=8.0, peak_rss_bytes=34)]
    fill(report, {"verl": ours, "trl": trl}, {"verl": 0.0, "trl": 0.01})
    assert report.results["ratios"]["trl"] == {"generate_s": 1.0, "train_s": 1.0, "step_s": 2.0, "processor_s": 1.0}
    assert report.results["peak_rss_bytes"] == {"verl": 12, "trl": 36}
    (header, rows) = report.tables[0]
    assert header == ["phase", "verl", "trl", "ratio to verl"]
    assert rows[2] == ["step", "4.00 s ±12%", "8.00 s ±0%", "2.00x"]
    assert rows[4][-1] == "3.00x"


def test_rollout_rounds_take_a_step_s_prompts_and_check_lengths():
    log = []
    work = Workload("m", "float32", num_prompts=2, num_samples=4, response_tokens=6)
    good = {"lengths": [6], "generate_s": 2.0}
    answers = rollout_cpu.alternate([FakePeer("verl", log, **good)], work, 2, 10.0)
    assert [step for _, _, step in log] == [0, 1, 2]
    assert [r["tokens_per_s"] for r in answers["verl"]] == [24.0, 24.0]
    with pytest.raises(Unequal, match=r"made 8 samples of \[5, 6\] tokens"):
        rollout_cpu.alternate([FakePeer("verl", log, **good | {"lengths": [5, 6]})], work, 1, 10.0)


def test_vllm_gets_every_core(monkeypatch):
    monkeypatch.setattr(rollout_cpu.os, "cpu_count", lambda: 8)
    assert rollout_cpu.vllm_environment()["VLLM_CPU_OMP_THREADS_BIND"] == "0-7"


def test_forms_of_trl():
    assert TRL_FORMS["shipped"].settings == {}
    assert not TRL_FORMS["shipped"].environment
    assert "mmap_threshold" in TRL_FORMS["best"].environment["GLIBC_TUNABLES"]


@pytest.mark.parametrize(
    ("text", "value"), [("beta=0.04", 0.04), ("a=True", True), ("loss_type=grpo", "grpo"), ("x=[1, 2]", [1, 2])]
)
def test_settings_are_typed(text, value):
    assert typed(text)[1] == value
