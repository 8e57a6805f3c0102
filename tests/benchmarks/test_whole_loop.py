"""The sides of benchmarks/whole_loop.py, and the conclusions from their metrics."""

import os

import pytest
from report import Report
from runs import Side, difference, measure, overrides, texts_of
from whole_loop import APART, SERIAL, SIDES, bounds, cores_used, fill, utilisation

from verl.config import load_config
from verl.programs.specs import placement_of

pytestmark = pytest.mark.seed("D1", "D3", "D4", "D5")
SAME = [["actor", "rollout"], ["reference", "critic"]]
APARTS = [["actor", "reference", "critic"], ["rollout"]]
TIMES = {
    "gen": 2.0,
    "reward": 1.0,
    "ref": 0.5,
    "values": 0.5,
    "update_actor": 2.0,
    "update_critic": 1.5,
    "update_weights": 0.5,
}


def metrics(step_s, num_steps=4):
    spans = {f"timing_s/{name}": seconds for name, seconds in TIMES.items()}
    return [
        {
            "step": n,
            "time": 50 + n * step_s,
            "perf/time_per_step": step_s,
            "rollout/seconds": 2.0,
            "busy": [4.0, 1.6],
            "run_s": 6.0,
        }
        | spans
        for n in range(1, num_steps + 1)
    ]


def test_the_sides_differ_in_devices_and_in_being_ahead():
    keys = ["algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=True"]
    for side in SIDES:
        count = [f"trainer.n_gpus_per_node={side.devices}"]
        config = load_config([*keys, *side.changes, *count], check=False).config
        devices = placement_of(config).devices
        expected = [[*SAME[0], *SAME[1]]] if side.devices == 1 else APARTS if side.name.startswith(APART) else SAME
        assert [[r for r in devices if devices[r] == (n,) and r != "reward"] for n in range(side.devices)] == expected
        assert config.actor_rollout_ref.rollout.prefetch_num == ("ahead" in side.name)


def test_bounds_follow_from_the_serial_runs_times(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert bounds({side.name: [metrics(8.0)] for side in SIDES}) == pytest.approx(
        {
            SERIAL: 1, "ahead": 8 / 7, "groups": 8 / 6.5, "groups, ahead": 8 / 4.5, APART: 1, f"{APART}, ahead": 8 / 5,
            f"{APART}, ahead, gathered": 8 / 5,
        }
    )  # fmt: skip


def test_processes_outside_the_devices_need_the_cores_too(monkeypatch):
    """Of 5.6 s that devices compute and 5.4 s that the driver does, two cores make 5.5 s."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    busy = [row | {"run_s": 11.0} for row in metrics(7.0)]
    limits = bounds({SERIAL: [metrics(8.0)], "groups": [busy], f"{APART}, ahead": [busy]})
    assert limits == pytest.approx({SERIAL: 1, "groups": 8 / 6.5, f"{APART}, ahead": 8 / 5.5})


def test_shares_and_utilisation(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    report = Report("a")
    fill(report, {side.name: [metrics(8.0 if side.name == SERIAL else 6.4)] for side in SIDES})
    assert report.results[SERIAL]["share_of_bound"] == 1
    assert report.results["rollout apart, ahead"]["times_faster"] == pytest.approx(1.25)
    assert report.results["rollout apart, ahead"]["share_of_bound"] == pytest.approx(1.25 / 1.6)
    assert utilisation([metrics(8.0)]) == pytest.approx([0.5, 0.2])
    assert cores_used([metrics(8.0)]) == pytest.approx(0.375)
    assert report.results["groups"]["beside_s"] == pytest.approx(0.4)
    assert report.results[SERIAL]["generation_s"] == pytest.approx(2.0)


def work(**changes):
    same = {"perf/total_num_tokens": 100, "critic/score/mean": 0.5, "actor/grad_norm": 2.0, "critic/grad_norm": 3.0}
    return [row | same | changes for row in metrics(1.0)]


def test_the_same_work_may_differ_by_rounding():
    assert difference(work(), work(**{"actor/grad_norm": 2.0001})) == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"perf/total_num_tokens": 99}, r"\[99, 99, 99, 99\] tokens in the steps, not \[100, 100, 100, 100\]"),
        ({"critic/score/mean": 0.6}, "critic/score/mean of the first step is 0.6, not 0.5"),
        ({"actor/grad_norm": float("nan")}, "actor/grad_norm of the first step is nan, not 2"),
    ],
)
def test_other_work_ends_the_comparison(tmp_path, changes, message):
    with pytest.raises(SystemExit, match="^other did not do the work of one: .*" + message):
        measure(
            (Side("one"), Side("other")), [], 1, tmp_path,
            lambda run, *_, **__: work(**(changes if "other" in run.name else {})),
        )  # fmt: skip


def test_sides_take_turns(tmp_path):
    log = []

    def train(run, changes, *, threads):
        log.append((run.name, threads, changes))
        return work()

    seconds = measure((Side("one"), Side("a, b", 2, ("k=v",))), ["c=d"], 2, tmp_path, train)
    assert {name: len(runs) for name, runs in seconds.items()} == {"one": 2, "a, b": 2}
    two = ["c=d", "k=v", "trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_cpus=2"]
    assert log == [("0-one", 1, ["c=d"]), ("0-a-b", 1, two), ("1-a-b", 1, two), ("1-one", 1, ["c=d"])]


def test_prompts_have_the_asked_lengths_and_are_all_different(tiny_llama, tmp_path):
    from verl.programs.ppo_data import load_data

    lengths = [[4, 9, 40], [12, 5, 4]]
    loader = load_data(load_config(overrides(tiny_llama, tmp_path / "work", lengths, 6)).config).train
    for step in range(2):
        prompts = [tuple(ids) for ids in loader.take(3 * step, 3).non_tensor_batch["prompt_token_ids"]]
        assert [len(ids) for ids in prompts] == lengths[step]
        assert len(set(prompts)) == 3
    assert [len(text) for text in texts_of([3, 0, 7])] == [3, 0, 7]
