"""A rank that is missing, dies, hangs or raises; a port in use: within the deadline, with rank, call and fix."""

import signal
import socket

import pytest

from tests.runtime.ranks import Ranks, family, run, still_there, wait_for_steps
from verl.errors import ConfigError
from verl.parallel.collectives import peer_of_environment

FAULTS = "tests.runtime.fault_ranks"


def test_a_good_end():
    run(2, FAULTS, "none")


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        ("dies", 10, ["WorkerLostError: Rank 0 waited", "rank 1 has ended", "critic.update"]),
        ("hangs", 9, ["DeadlineError: Rank 0 waited 4 s", "rank 1 hangs or is slow (last seen in critic.update",
                      "its stack: critic.update for", "s, in go_wrong (fault_ranks.py:"]),
        ("raises", 10, ["Rank 1 failed in critic.update: ValueError: the loss is purple"]),
    ],
)  # fmt: skip
def test_a_rank_goes_wrong(kind, code, words):
    with Ranks(2, FAULTS, kind) as ranks:
        text, _ = ranks.processes[0].communicate(timeout=120)
        assert ranks.processes[0].returncode == code, text
    for word in words:
        assert word in text, text


def test_a_missing_rank_is_named():
    with Ranks(3, FAULTS, "misses a rank", ranks=[0, 2]) as ranks:
        codes, texts = ranks.wait()
    assert codes == [9, 9]
    assert "waited 6 s" in texts[0]
    assert "for rank 1 of 3" in texts[0]


def test_a_port_in_use():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with Ranks(2, FAULTS, "none", port=taken.getsockname()[1], ranks=[0]) as ranks:
            codes, texts = ranks.wait()
    assert codes == [2]
    assert "is in use by another program" in texts[0]
    assert "MASTER_PORT" in texts[0]


@pytest.mark.slow
def test_nobody_serves_the_meeting():
    with Ranks(2, FAULTS, "misses a rank", ranks=[1]) as ranks:
        codes, texts = ranks.wait()
    assert codes == [9]
    assert "rank 0 does not run there" in texts[0]


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "0"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "whole numbers"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "not one of the 2 ranks"),
    ],
)
def test_an_environment_that_makes_no_sense(variables, words):
    with pytest.raises(ConfigError, match=words):
        peer_of_environment(variables)
    assert peer_of_environment({}) is None


def test_a_rank_that_is_killed_while_training(jobs):
    """The other one ends with a sentence, and nothing is left running."""
    long = ["trainer.total_training_steps=500", "trainer.test_freq=-1", "trainer.save_freq=-1"]
    jobs.add("killed", *long, may_fail=True, has_scorers=True)
    file = jobs.file()
    with Ranks(2, "tests.runtime.several_runs", file) as ranks:
        wait_for_steps(jobs.run("killed").folder / "metrics.jsonl", 2, *ranks.processes)
        processes = family(*ranks.processes)
        assert len(processes) > 2, "each rank has scorers"
        ranks.processes[1].kill()
        text, _ = ranks.processes[0].communicate(timeout=120)
        assert still_there(processes) == []
    assert "ERROR WorkerLostError: Rank 0 waited" in text, text[-3000:]
    assert "rank 1" in text


@pytest.mark.slow
def test_a_stop_on_one_rank_is_a_stop_of_all(jobs):
    """Both save after the same step, and the run continues from there."""
    jobs.add(
        "stopped", "trainer.total_training_steps=500", "trainer.test_freq=-1", "trainer.save_freq=-1", may_fail=True
    )
    folder = jobs.run("stopped").folder
    with Ranks(2, "tests.runtime.several_runs", jobs.file()) as ranks:
        wait_for_steps(folder / "metrics.jsonl", 1)
        ranks.processes[1].send_signal(signal.SIGTERM)
        codes, texts = ranks.wait()
    assert codes == [0, 0]
    assert all("ERROR InterruptedRun: Stopped on request after step" in text for text in texts), texts[0][-2000:]
    steps = [row["step"] for row in jobs.run("stopped").rows]
    assert (folder / f"global_step_{steps[-1]}" / "manifest.json").exists()
