"""Each script from end to end: a tiny model, one round, no peer that is not installed here."""

import ast
import json
import math
from importlib import import_module
from pathlib import Path

import learning_cpu
import peers_cpu
import pyarrow
import pyarrow.parquet as parquet
import pytest
import ranks_cpu
import rollout_cpu
import sft_cpu
import torch
from workload import WeightProbe, compute_score

from tests.run.trl_oracle import python_of

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def names_imported_by(file):
    """(module, name) of each `from benchmarks.module import name` in `file`."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("benchmarks."):
            yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("file", sorted(BENCHMARKS.rglob("*.py")), ids=lambda file: file.stem)
def test_names_that_scripts_take_from_each_other_exist(file):
    for module, name in names_imported_by(file):
        assert hasattr(import_module(module), name), f"{file.name} imports {name} of {module}"


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
def test_rollout_cpu(tiny_work, tmp_path):
    report = rollout_cpu.main([*tiny_work, "--json", str(tmp_path / "r.json"), "--logs", str(tmp_path)])
    assert set(report.results["tokens_per_s"]) == {"verl", "generate"}
    assert report.results["log_prob_gap"] < 1e-4
    assert saved(tmp_path)["results"]["ratios"]["generate"] == pytest.approx(
        report.results["tokens_per_s"]["verl"]["median"] / report.results["tokens_per_s"]["generate"]["median"]
    )


def test_a_probe_sees_a_change_of_any_parameter():
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(200, 200))
    probe = WeightProbe(module)
    assert probe.change() == 0.0
    with torch.no_grad():
        module[0].bias[1] += 3.0
        module[1].weight += 0.5
    assert probe.change() == pytest.approx((9 + 0.25 * (40000 // 10)) ** 0.5, rel=0.01)
    assert probe.change() == 0.0


@pytest.mark.slow
def test_sft_cpu_of_pairs(tiny_llama, tmp_path):
    lengths = ["--prompt-tokens", "8", "--completion-tokens", "4", "--rows", "2", "--rounds", "1", "--trl"]
    report = sft_cpu.main(
        ["--dpo", "--model", str(tiny_llama), *lengths, "--json", str(tmp_path / "r.json"), "--logs", str(tmp_path)]
    )
    first, second = report.results["losses"]["verl"]
    assert first == pytest.approx(math.log(2), abs=1e-5)
    assert second != first
    assert saved(tmp_path)["facts"]["verl"]["tokens_per_step"] == 2 * 2 * 12


@pytest.mark.slow
def test_sft_cpu(tiny_llama, tmp_path):
    """Both sides train on the same tokens, to the same loss; a template's line end behind a turn is none of them."""
    python_of("trl")
    rows = ["--rows", "2", "--letters", "2", "6", "--rounds", "1", "--trl", "unpacked", "--logs", str(tmp_path)]
    report = sft_cpu.main(["--model", str(tiny_llama), *rows, "--json", str(tmp_path / "r.json")])
    assert report.results["loss_gaps"]["trl unpacked"] < 1e-5
    assert set(saved(tmp_path)["results"]["losses"]) == {"verl", "trl unpacked"}


@pytest.mark.slow
def test_learning_cpu(tiny_llama, tmp_path):
    """Both sides take the questions of the main job, and their rewards are of one function."""
    python_of("trl")
    rows = [
        {"prompt": [{"role": "user", "content": f"{n} + 1?"}], "reward_model": {"ground_truth": str(n + 1)}}
        for n in range(9)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    sizes = ["--prompts", "2", "--samples", "2", "--rounds", "3", "--seeds", "1", "--goal", "0"]
    report = learning_cpu.main(["--model", str(tiny_llama), "--data", str(tmp_path / "rows.parquet"), *sizes])
    for side in ("verl", "trl equal"):
        assert len(report.results["seed 1"]["steps"][side]) == 4
        assert report.results["seed 1"]["reached_s"][side] > 0
    assert compute_score("", "6 or 7", "7") == 1.0
    assert compute_score("", "7 or 6", "7") == 0.0


@pytest.mark.slow
def test_ranks_cpu(tiny_llama, tmp_path):
    messages = [[{"role": "user", "content": f"{n} + 1?"}, {"role": "assistant", "content": str(n)}] for n in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in messages))
    files = [f"data.{kind}_files={tmp_path / 'rows.jsonl'}" for kind in ("train", "val")]
    keys = ["--set", f"model.path={tiny_llama}", "data.train_batch_size=4", *files]
    report = ranks_cpu.main(["--config", "sft_smollm2", "--rounds", "1", *keys, "--json", str(tmp_path / "r.json")])
    assert (
        report.facts["bytes that a process sends in a step"][1]
        == 0
        < report.facts["bytes that a process sends in a step"][0]
    )
    assert len(saved(tmp_path)["results"]["step_s"]["ratios"]) == 2


@pytest.mark.slow
def test_ranks_cpu_against_two_processes_of_trl(tiny_work):
    python_of("trl")
    options = ["--trl", "best", *tiny_work]
    assert ranks_cpu.main(options).facts["rounds of equal samples"] == 2
    with pytest.raises(peers_cpu.Unequal, match="different work in step 0"):
        ranks_cpu.main([*options, "--set", "data.max_response_length=5"])
