"""benchmarks/prefetch.py without its runs: the keys of both sides, and the conclusions from their metrics."""

import json

import prefetch
import pytest
from prefetch import oldest_sample, overrides, step_seconds

from verl.config import load_config
from verl.parallel.placement import Placement


def metrics(step_s, age=None):
    staleness = {} if age is None else {"training/off_policy/trajectory_staleness/max": float(age)}
    return [{"step": n, "time": 10 + n * step_s, **staleness} for n in range(1, 6)]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "actor, rollout, reference, critic, reward on 0"),
        (["--split"], "actor, reference, critic on 0; rollout, reward on 1"),
    ],
)
@pytest.mark.parametrize("ahead", [0, 2])
def test_both_sides_get_the_same_devices(tiny_llama, tmp_path, options, sentence, ahead):
    arguments = prefetch._parse(["--model", str(tiny_llama), *options, "--set", "data.seed=3"])
    config = load_config([*overrides(arguments, tmp_path), f"actor_rollout_ref.rollout.prefetch_num={ahead}"]).config
    assert Placement.of(config).sentence() == sentence
    assert config.data.seed == 3
    assert config.reward.num_workers == 2 * 4 * 3
    assert len((tmp_path / "train.jsonl").read_text().splitlines()) == 2 * 14


def test_the_warm_up_does_not_count():
    assert step_seconds(metrics(0.5)) == [0.5] * 3
    assert step_seconds(metrics(0.5)[:2]) == []


def test_the_oldest_sample_of_all_runs():
    assert oldest_sample([metrics(1.0, 1), metrics(1.0, 2)]) == 2


def test_steps_that_come_in_bursts_count_with_their_mean(tiny_llama, monkeypatch, tmp_path):
    burst = [dict(row, time=10 + [0, 0, 0.1, 0.2, 1.2][i]) for i, row in enumerate(metrics(1.0, 1))]
    monkeypatch.setattr(prefetch, "train", lambda run, *a, **k: metrics(0.8) if run.name.endswith("-0") else burst)
    assert prefetch.main(["--model", str(tiny_llama), "--json", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["steps"]["prefetch 2"]["median"] == pytest.approx(0.4)
    assert found["ratio"] == pytest.approx(2.0)


@pytest.mark.parametrize(("age", "code"), [(2, 0), (3, 1)])
def test_an_older_sample_than_the_bound_is_a_failure(tiny_llama, tmp_path, monkeypatch, capsys, age, code):
    runs = []

    def train(run, changes, *, threads):
        runs.append((run.name, threads))
        return metrics(1.0) if run.name.endswith("-0") else metrics(0.5, age)

    monkeypatch.setattr(prefetch, "train", train)
    out = tmp_path / "out.json"
    assert prefetch.main(["--model", str(tiny_llama), "--split", "--json", str(out)]) == code
    assert runs == [("0-0", 1), ("0-2", 1), ("1-0", 1), ("1-2", 1)]
    assert f"{age} weight versions old; the bound is 2" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert (found["ratio"], found["oldest_sample"], found["bound"]) == (2.0, age, 2)


@pytest.mark.parametrize("argv", [["--prefetch", "0"], ["--steps", "2"], ["--rounds", "0"]])
def test_arguments_that_measure_nothing(argv, capsys):
    with pytest.raises(SystemExit):
        prefetch._parse(argv)
    assert "are needed" in capsys.readouterr().err
