"""Two Ray nodes on this machine; one is killed while the run trains."""

import subprocess
import sys

import pytest

from tests.processes import wait_until
from tests.runtime.conftest import assert_same_weights, train_here
from tests.runtime.ranks import ROOT, end_tree, environment, survivors

ray = pytest.importorskip("ray")

from ray.cluster_utils import Cluster  # noqa: E402 - needs ray

STEPS = 12


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield cluster
    cluster.shutdown()


def drive(jobs, file):
    command = [sys.executable, "-m", "tests.runtime.several_runs", str(file)]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment(RAY_AUTH_MODE="disabled"), text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.mark.slow
def test_a_node_is_killed_and_the_run_goes_on_from_its_checkpoint(cluster, jobs):
    changes = [
        "trainer.nnodes=2", "trainer.n_gpus_per_node=1", f"ray_kwargs.ray_init.address={cluster.address}",
        f"trainer.total_training_steps={STEPS}", "trainer.test_freq=-1", "trainer.save_freq=1",
        "trainer.call_timeout_s=60", "trainer.total_epochs=10",
    ]  # fmt: skip
    other = cluster.add_node(num_cpus=1)
    name = other.node_id
    jobs.add("nodes", *changes, may_fail=True)
    file, folder = jobs.file(), jobs.run("nodes").folder
    driver = drive(jobs, file)
    try:
        saved = (folder / "global_step_2" / "manifest.json").exists
        assert wait_until(lambda: saved() or driver.poll() is not None), "two steps were not saved"
        assert driver.poll() is None, driver.stdout.read()[-3000:]
        cluster.remove_node(other, allow_graceful=False)
        text, _ = driver.communicate(timeout=300)
    finally:
        end_tree(driver.pid)
    assert "ERROR WorkerLostError: Rank " in text, text[-3000:]
    assert name[:8] in text, text[-3000:]
    assert survivors(str(jobs.root)) == []
    done = len(jobs.run("nodes").rows)
    assert 2 <= done < STEPS

    cluster.add_node(num_cpus=1)
    jobs.add("nodes", *changes)
    driver = drive(jobs, jobs.file())
    try:
        text, _ = driver.communicate(timeout=120)
    finally:
        end_tree(driver.pid)
    assert driver.returncode == 0, text[-3000:]
    assert [row["step"] for row in jobs.run("nodes").rows] == list(range(1, STEPS + 1))
    same = [c for c in changes if c.startswith("trainer.t")]
    assert_same_weights(jobs.run("nodes"), train_here(jobs, "one_node", *same, "trainer.save_freq=6"), STEPS, rel=1e-10)
