"""The simulator: the plan's own time without disturbance, stragglers, queues, and the files of a run."""

from dataclasses import replace
from functools import cache

import pytest

from verl.planner import Cluster, Dataflow, Lengths, Rules, Space, Workload, known_shape, search
from verl.planner.simulate import Conditions, simulate
from verl.tracking.progress import read_progress
from verl.tracking.timeline import read_timeline

QUIET = Conditions(steps=20, jitter=0.0)


@cache
def plan(devices=16, asynchronous="off"):
    shape = known_shape("Qwen2.5-7B")
    work = Workload(64 * devices, 4, 300, Lengths.of(1000, 4096))
    space = Space(zero=(3,), pipelines=(1,), tensors=(1, 2), offload=False)
    rules = Rules(asynchronous=asynchronous, space=space)
    return search(Dataflow.ppo(shape, None, shape), Cluster.of("h100_sxm", devices), work, rules)[0]


def test_without_disturbance_a_step_takes_what_the_plan_says():
    run = simulate(plan(), QUIET)
    assert len(run.rows) == 20
    assert run.total_s / 20 == pytest.approx(plan().step_s)
    assert all(sum(row["phases"].values()) == pytest.approx(row["seconds"]) for row in run.rows)


def test_a_rollout_ahead_hides_behind_training_after_the_first_step():
    run = simulate(plan(asynchronous="on"), QUIET)
    steady = [row["seconds"] for row in run.rows[2:]]
    assert max(steady) == pytest.approx(plan(asynchronous="on").step_s, rel=0.02)
    assert run.rows[0]["seconds"] > max(steady)


def test_stragglers_cost_more_on_more_devices():
    """The slowest of n devices decides: for normal jitter that grows with n."""
    conditions, small = Conditions(steps=20, jitter=0.05), plan()
    large = replace(small, devices=(128,), cluster=small.cluster.with_devices(128))
    slow = [simulate(p, conditions).total_s / 20 / p.step_s for p in (small, large)]
    assert 1.03 < slow[0] < slow[1] < 1.3


def test_the_same_seed_gives_the_same_run():
    conditions = Conditions(steps=10, jitter=0.05)
    assert simulate(plan(), conditions, seed=1) == simulate(plan(), conditions, seed=1)
    assert simulate(plan(), conditions, seed=1).total_s != simulate(plan(), conditions, seed=2).total_s


def test_ten_thousand_devices_for_a_hundred_steps():
    small = plan()
    large = replace(small, devices=(10_000,), cluster=small.cluster.with_devices(10_000))
    conditions = Conditions(steps=100, jitter=0.02)
    run = simulate(large, conditions)
    assert len(run.rows) == 100
    assert run.total_s > 100 * small.step_s


def test_verl_show_reads_a_simulated_run(tmp_path):
    run = simulate(plan(), QUIET)
    run.write(tmp_path)
    assert [row["step"] for row in read_timeline(tmp_path / "timeline.jsonl")] == list(range(1, 21))
    progress = read_progress(tmp_path)
    assert progress.step == 20
    assert progress.bottleneck.name in ("rollout-bound", "training-bound")
    assert progress.bottleneck.step_s == pytest.approx(plan().step_s)
