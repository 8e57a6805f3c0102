"""Runs on two hosts: the metrics of one process, and an end within the deadline when the network is cut.

Slow, for root: `python -m pytest -m slow -p no:xdist tests/runtime/test_hosts.py` (about two minutes).
"""

import subprocess
import sys

import pytest

from tests.runtime.conftest import assert_same, assert_same_weights, train_here
from tests.runtime.hosts import ADDRESSES, Hosts
from tests.runtime.ranks import wait_for_steps
from verl.parallel.collectives import free_port

pytestmark = pytest.mark.slow
TRAIN = [sys.executable, "-m", "verl.trainer.main_ppo"]
TWO_HOSTS = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1", "actor_rollout_ref.nccl_timeout=60"]


@pytest.fixture
def hosts(tmp_path):
    with Hosts(tmp_path) as started:
        yield started


def ranks(hosts, overrides):
    """A rank on each host, as a launcher would start it."""
    port = free_port()
    return [
        hosts.start(
            rank,
            [*TRAIN, *overrides],
            RANK=rank,
            LOCAL_RANK=0,
            WORLD_SIZE=2,
            MASTER_ADDR=ADDRESSES[0],
            MASTER_PORT=port,
        )
        for rank in (0, 1)
    ]


def ended(process, timeout_s):
    """(Exit code, output) of a process."""
    try:
        text, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"no end within {timeout_s} s: {process.communicate()[0][-3000:]}") from None
    return process.returncode, text


def assert_as_in_one_process(jobs, name):
    run, reference = jobs.run(name), train_here(jobs, "here")
    assert_same(run, reference, rel=1e-10)
    assert_same_weights(run, reference, 3, rel=1e-10)


def test_a_rank_on_each(hosts, jobs):
    for process in ranks(hosts, jobs.overrides("hosts", *TWO_HOSTS)):
        code, text = ended(process, 120)
        assert code == 0, text[-3000:]
    assert_as_in_one_process(jobs, "hosts")


def test_ray(hosts, jobs):
    pytest.importorskip("ray")
    ray = [sys.executable, "-m", "ray.scripts.scripts"]  # its command need not be on the PATH
    start = [*ray, "start", "--num-cpus", "2", "--node-ip-address"]
    head = [*start, ADDRESSES[0], "--head", "--port", "6379", "--include-dashboard", "false"]
    overrides = jobs.overrides("ray", *TWO_HOSTS, f"ray_kwargs.ray_init.address={ADDRESSES[0]}:6379")
    both = f'until [ "$({_quoted(ray)} status 2>/dev/null | grep -c "^ 1 node_")" = 2 ]; do sleep 1; done'
    script = (
        f"{_quoted(head)} >&2 && {both}; {_quoted([*TRAIN, *overrides])}; code=$?; {_quoted(ray)} stop -f; exit $code"
    )
    quiet = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    first = hosts.start(0, ["bash", "-c", script], **quiet)
    join = f"until {_quoted([*start, ADDRESSES[1], '--address', ADDRESSES[0] + ':6379', '--block'])}; do sleep 1; done"
    hosts.start(1, ["bash", "-c", f"{join} > {hosts.folder}/second.log 2>&1"], **quiet)
    code, text = ended(first, 200)
    assert code == 0, text[-3000:]
    assert_as_in_one_process(jobs, "ray")


def test_the_network_is_cut(hosts, jobs):
    """Both ranks say so within the deadline and a few reads of the rank status, on either host."""
    endless = ["trainer.total_training_steps=100000", "trainer.total_epochs=100000", "trainer.save_freq=-1"]
    limits = ["trainer.test_freq=-1", "trainer.call_timeout_s=15", "actor_rollout_ref.nccl_timeout=15"]
    processes = ranks(hosts, jobs.overrides("cut", *TWO_HOSTS[:2], *endless, *limits))
    wait_for_steps(jobs.run("cut").folder / "metrics.jsonl", 3, *processes)
    hosts.cut()
    for rank, process in enumerate(processes):
        code, text = ended(process, 60)
        assert code == 9, text[-3000:]
        assert f"verl train: Rank {rank} waited 1" in text
        assert ("rank 1 hangs or is slow" if rank == 0 else "The rendezvous is gone or silent too") in text


def _quoted(command):
    return " ".join(f"'{word}'" for word in command)
