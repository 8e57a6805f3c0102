"""benchmarks/chaos.py: a run that is killed several times ends like one that was left alone; how kills are drawn, counted."""

import json
import random
from types import SimpleNamespace

import chaos
import pytest
from chaos_run import RUNTIMES, Kill, Moment, Victim, differences, make_task, plan

from verl.config import load_config
from verl.trainer.run import train


@pytest.fixture
def task(tmp_path, tiny_llama):
    return make_task(tmp_path, steps=6, model=str(tiny_llama), warm=True)


def left_alone(task):
    """The same run, in this process."""
    folder = task.folder / "alone"
    assert train(load_config([*task.keys, f"trainer.default_local_dir={folder}"])) == 0
    return SimpleNamespace(folder=folder, task=task)


@pytest.mark.slow
def test_a_run_that_is_killed_three_times_equals_the_unbroken_one(task):
    """Once its process while it generates, once while it saves, and once its supervisor, which takes all with it."""
    victim, rng = Victim(task, "local", "killed"), random.Random(0)
    try:
        kills = [
            victim.strike(moment, rng)
            for moment in (
                Moment(1, "gen", "driver", 0.01),
                Moment(2, "save_checkpoint", "driver", 0.005),
                Moment(3, "any", "supervisor", 0.0),
            )
        ]
        victim.to_the_end()
        assert [kill.back_by for kill in kills] == ["supervisor", "supervisor", "hand"]
        assert all(kill.steps_again <= 3 for kill in kills)
        assert differences(victim, left_alone(task)) == []
        events = [json.loads(line) for line in (victim.folder / "events.jsonl").read_text().splitlines()]
        assert [event["cause"] for event in events] == ["SIGKILL", "SIGKILL"]
    finally:
        victim.end()


@pytest.mark.slow
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_twelve_kills(runtime, tmp_path):
    """pytest -m slow tests/benchmarks/test_chaos.py"""
    assert chaos.main(["--kills", "12", "--kills-per-run", "12", "--runtimes", runtime, "--seed", "3"]) == 0


def test_kills_are_shared_out_and_drawn_from_the_seed():
    assert chaos.shares(["local", "async", "torchrun", "ray"], 100) == {
        "local": 40,
        "async": 20,
        "torchrun": 20,
        "ray": 20,
    }
    assert sum(chaos.shares(["torchrun", "ray", "local"], 7).values()) == 7
    first, second = (plan(random.Random("1/ray/0"), "ray", 9) for _ in range(2))
    assert first == second
    assert [moment.step for moment in first] == list(range(1, 10))
    assert {m.target for m in plan(random.Random(0), "ray", 50, ["rank"])} == {"rank"}


def test_the_report_has_every_target_and_phase():
    kills = [
        Kill("local", "r", "driver", 3, "gen", "supervisor", 5.0, 2),
        Kill("ray", "r", "rank", 1, "gen", "hand", 9, 0),
    ]
    text = chaos.report(kills)
    for word in ("local: driver", "ray: rank", "by phase", "gen", "all"):
        assert word in text
    assert chaos.report([])


def test_weights_and_samples_are_compared(tmp_path, monkeypatch):
    folders = []
    for name in ("one", "two"):
        saved = tmp_path / name / "global_step_6" / "actor"
        saved.mkdir(parents=True)
        (saved / "model.safetensors").write_bytes(name.encode())
        folders.append(SimpleNamespace(folder=tmp_path / name, task=SimpleNamespace(steps=6), left_in_the_end=list))
    from collections import Counter

    trained = {"one": Counter({(0, 0, "a"): 2}), "two": Counter({(0, 0, "a"): 1, (0, 1, "b"): 1})}
    monkeypatch.setattr("chaos_run._trained", lambda folder: trained[folder.name])
    assert differences(*folders) == [
        "weights differ: actor/model.safetensors",
        "1 samples trained that should not, 1 did not",
    ]
