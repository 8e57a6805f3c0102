"""Whole runs in which something hangs: they end within the deadline, and say who hangs, in what, for how long and where.

    pytest -m slow tests/runtime/test_stuck.py

The same on a smaller scale is in the default suite: ranks in test_faults.py, actors in test_ray.py, the writing of a checkpoint
in tests/cli/test_supervise.py, scorers in tests/rewards.
"""

import re
import subprocess
import sys
import time

import pytest

from tests.runtime.ranks import ROOT, Ranks, end_tree, environment, survivors

pytestmark = pytest.mark.slow
DEADLINE_S = 10
RAY_DEADLINE_S = 25  # the building of the roles has it too
LIB = "actor_rollout_ref.model.external_lib=tests.runtime.stuck"


def train(jobs, name, *changes, stuck):
    """(exit code, output, seconds) of the command line."""
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *jobs.overrides(name, LIB, *changes)]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(STUCK=stuck), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    began = time.monotonic()
    try:
        said, _ = process.communicate(timeout=120)
    finally:
        end_tree(process.pid)
    return process.returncode, said, time.monotonic() - began


def test_a_rank(jobs):
    jobs.add(
        "rank",
        LIB,
        f"actor_rollout_ref.nccl_timeout={DEADLINE_S}",
        f"trainer.call_timeout_s={DEADLINE_S}",
        may_fail=True,
    )
    with Ranks(2, "tests.runtime.several_runs", jobs.file(), forked=False, STUCK="update") as ranks:
        said, _ = ranks.processes[0].communicate(timeout=60)
    assert re.search(r"Rank 0 waited \d+ s for .* in actor.update", said), said[-3000:]
    assert re.search(
        r"rank 1 hangs or is slow \(last seen in actor.update, \d+ s ago; its stack: actor.update for \d+ s, in "
        r"sleeps_forever \(stuck.py:\d+\) < update",
        said,
    ), said[-3000:]
    assert survivors(str(jobs.root)) == []


def test_an_actor_of_ray(jobs):
    pytest.importorskip("ray")
    code, said, _ = train(
        jobs, "ray", "trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_cpus=2", f"trainer.call_timeout_s={RAY_DEADLINE_S}",
        "trainer.max_restarts=0", stuck="update",
    )  # fmt: skip
    assert code == 9, said[-3000:]
    assert re.search(
        r"rank 1 \(.*; node .*, process \d+\) \[its stack: actor.update for \d+ s, in sleeps_forever \(stuck.py:\d+\)",
        said,
    ), said[-3000:]
    assert f"did not finish actor.update within {RAY_DEADLINE_S} s" in said
    assert survivors(str(jobs.root)) == []


def test_the_writing_of_a_checkpoint(jobs):
    """The supervisor sees it, starts the run again, and sees it again."""
    code, said, _ = train(
        jobs, "save", "trainer.hang_timeout_s=3", "trainer.restart_backoff_s=0.1", "trainer.save_freq=1", stuck="save"
    )
    assert code == 9, said[-3000:]
    assert re.search(r"in step 1 \(\w+\) with a hang: \w+ took more than trainer.hang_timeout_s=3 s", said), said[
        -3000:
    ]
    assert "sleeps_forever (stuck.py:" in said
    assert "twice in a row in the same way" in said
    assert survivors(str(jobs.root)) == []
