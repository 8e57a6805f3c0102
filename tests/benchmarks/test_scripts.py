"""Each script from end to end: a tiny model, one round, no peer that is not installed here."""

import json
import math
import os
import sys

import agents_peers
import limits
import memory
import peers_cpu
import preference_cpu
import pytest
import rollout_cpu
import roofline
import side_by_side
import torch
from as_verb import as_verb
from flops import Decoder
from weight_probe import WeightProbe

from verl.errors import ConfigError


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch):
    monkeypatch.setattr(limits, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(limits, "STREAM_BYTES", 1 << 20)


def saved(folder):
    return json.loads((folder / "r.json").read_text())


@pytest.mark.slow
def test_peers_cpu(tiny_work, tmp_path):
    report = peers_cpu.main([*tiny_work, "--trl", "--json", str(tmp_path / "r.json"), "--logs", str(tmp_path)])
    phases = report.results["phases"]["verl"]
    assert 0 < phases["generate_s"]["median"] + phases["train_s"]["median"] <= phases["step_s"]["median"]
    assert report.results["weight_change"]["verl"]["median"] > 0
    assert report.results["log_prob_gap"] < 1e-4
    assert report.results["peak_rss_bytes"]["verl"] > 1e8
    assert saved(tmp_path)["facts"]["verl"]["parameter_dtype"] == "float32"


@pytest.mark.slow
def test_agents_peers(tiny_work, tmp_path):
    episodes = ["--turns", "2", "--turn-tokens", "3", "--latency-ms", "1"]
    report = agents_peers.main(
        [*tiny_work, *episodes, "--trl", "--json", str(tmp_path / "r.json"), "--logs", str(tmp_path)]
    )
    assert report.results["weight_change"]["verl"]["median"] > 0
    assert report.notes[-1].startswith("Steps per hour: verl ")
    assert "2 turns of 3 tokens" in saved(tmp_path)["facts"]["workload"]


@pytest.mark.slow
def test_rollout_cpu(tiny_work, tmp_path):
    report = rollout_cpu.main([*tiny_work, "--json", str(tmp_path / "r.json"), "--logs", str(tmp_path)])
    assert set(report.results["tokens_per_s"]) == {"verl", "generate"}
    assert report.results["greedy"] == {"num_samples": 2, "num_equal": 2, "logit_gaps_where_different": []}
    assert report.results["log_prob_gap"] < 1e-4
    assert 0 < report.results["decode"]["share"] <= 1.5
    assert saved(tmp_path)["results"]["ratios"]["generate"] == pytest.approx(
        report.results["tokens_per_s"]["verl"]["median"] / report.results["tokens_per_s"]["generate"]["median"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["generate", "step"])
def test_side_by_side(phase, tiny_work, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    report = side_by_side.main([*tiny_work, "--phase", phase, "--settings", "as shipped", "--logs", str(tmp_path)])
    found = report.results["as shipped"]
    assert found["together"]["median"] == pytest.approx(sum(found["each"]["values"]))
    assert found["alone"]["median"] > 0


@pytest.mark.slow
def test_roofline(tiny_work, tmp_path):
    report = roofline.main([*tiny_work, "--batches", "4", "8", "--json", str(tmp_path / "r.json")])
    reached = report.results["reached"]
    assert set(reached) == {"prefill", "decode_4", "decode_8", "training"}
    for phase in reached.values():
        assert phase["rate"] == pytest.approx(phase["flops"] / phase["time_s"]["median"])
        assert 0 < phase["share"] < 1
    assert reached["training"]["tokens"] == 2 * (12 + 4 * 5)
    assert report.results["limits"]["square"] > 1e9


@pytest.mark.slow
def test_memory(tiny_work, tmp_path):
    report = memory.main([*tiny_work, "--json", str(tmp_path / "r.json"), "--logs", str(tmp_path)])
    bound, peak = report.results["bound_bytes"], report.results["peak_rss_bytes"]["verl"]
    assert bound["interpreter"] < bound["total"] <= peak


def test_products_have_the_model_s_operations(tiny_llama):
    model = Decoder.of_folder(tiny_llama)
    for joined in (False, True):
        products = limits.model_products(model, 5, joined=joined)
        assert products.flops == model.layers(5) + model.head(5)
    assert limits.training_rate(model, 16, torch.float32) > 0


def test_a_probe_sees_a_change_of_any_parameter():
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(200, 200))
    probe = WeightProbe(module)
    assert probe.change() == 0.0
    with torch.no_grad():
        module[0].bias[1] += 3.0
        module[1].weight += 0.5
    assert probe.change() == pytest.approx((9 + 0.25 * (40000 // 10)) ** 0.5, rel=0.01)
    assert probe.change() == 0.0


def test_code_runs_as_a_verb_of_the_command_line(monkeypatch, capsys):
    monkeypatch.setattr(os, "environ", dict(os.environ))  # variables that the command line sets stay in this test

    def refused():
        raise ConfigError("No such key.")

    called = []
    assert as_verb(lambda: called.append(1)) == 0
    assert called == [1]
    assert as_verb(refused) == ConfigError.exit_code
    assert "No such key." in capsys.readouterr().err
    assert not [name for name in sys.modules if name.endswith(".measured")]


@pytest.mark.slow
def test_preference_cpu(tiny_llama, tmp_path):
    lengths = ["--prompt-tokens", "8", "--completion-tokens", "4", "--rows", "2", "--rounds", "1", "--trl"]
    report = preference_cpu.main(
        ["--model", str(tiny_llama), *lengths, "--json", str(tmp_path / "r.json"), "--logs", str(tmp_path)]
    )
    first, second = report.results["losses"]["verl"]
    assert first == pytest.approx(math.log(2), abs=1e-5)
    assert second != first
    assert saved(tmp_path)["facts"]["verl"]["tokens_per_step"] == 2 * 2 * 12
