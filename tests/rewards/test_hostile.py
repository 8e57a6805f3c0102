"""Scorers that attack: each costs its own sample, is named, and leaves no process, no folder and no score of others behind."""

import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap

import pytest

from tests.rewards.attacks import ATTACKS, SIX, processes_of, reaper_of
from tests.rewards.test_pool import request, wait_until
from verl.rewards.sandbox.limits import Limits


@pytest.mark.parametrize("attack", SIX)
def test_an_attack_costs_one_sample_and_leaves_nothing(attacked, attack, caplog):
    pool = attacked()
    before, bad, after = pool.score_all([request("0.25"), request(attack), request("0.5")])
    assert (before.score, before.error) == (0.25, None)
    assert (after.score, after.error) == (0.5, None)
    assert bad.score == -0.5
    for words in (SIX[attack], "compute_score", "attacks.py", f"for sample {attack}", "default score -0.5"):
        assert words in bad.error
    assert attack != "fork_bomb" or "is scored by another reward worker" not in caplog.text
    pool.close()
    assert processes_of(os.getpid()) == []


def test_attacks_in_processes_of_their_own(attacked):
    pool = attacked(process_per_sample=True)
    attacks = ("segfault", "fork_bomb", "forge")
    scores = pool.score_all([request(r) for attack in attacks for r in ("0.25", attack)])
    assert [s.score for s in scores] == [0.25, -0.5] * 3
    assert all(SIX[attack] in bad.error for attack, bad in zip(attacks, scores[1::2], strict=True))
    pool.close()
    assert processes_of(os.getpid()) == []


@pytest.mark.slow
def test_the_same_where_the_kernel_grants_no_namespaces(attacked, no_namespaces, caplog):
    """pytest -m slow tests/rewards/test_hostile.py"""
    with caplog.at_level(logging.WARNING), socket.create_server(("127.0.0.1", 0)) as server:
        port = {"port": server.getsockname()[1]}
        (connected,) = attacked(timeout_s=10).score_all([request("connect_from_program", extra_info=port)])
    assert (connected.score, connected.error) == (0.0, None)
    attacks = ("ignore_sigterm", "fork_bomb", "fork_and_leave", "segfault", "forge")
    pool = attacked()
    scores = pool.score_all([request(r) for attack in attacks for r in (attack, "0.5")])
    for attack, bad, after in zip(attacks, scores[::2], scores[1::2], strict=True):
        # of a limit on the clock and one on processes, whichever is seen first
        words = (SIX.get(attack, SIX["fork_bomb"]), *(["took longer"] if "fork" in attack else []))
        assert any(w in bad.error for w in words), bad.error
        assert (after.score, after.error) == (0.5, None)
    pool.close()
    assert len(processes_of(os.getpid())) == 2, "more than the first pool's reaper and scorer"
    assert "grants no PID namespace" in caplog.text
    assert "grants no network namespace" in caplog.text


@pytest.mark.slow
def test_processes_of_their_own_without_namespaces(attacked, no_namespaces):
    """pytest -m slow tests/rewards/test_hostile.py"""
    pool = attacked(process_per_sample=True, timeout_s=2.0)
    attacks = ("poison", "fork_bomb", "fork_and_leave", "forge")
    scores = pool.score_all([request(r) for attack in attacks for r in (attack, "0.5")])
    assert scores[0].score == 0.25
    assert all(bad.score == -0.5 for bad in scores[2::2])
    assert [(after.score, after.error) for after in scores[1::2]] == [(0.5, None)] * 4
    assert len(processes_of(os.getpid())) == 2, "a process of a sample lives on beside reaper and scorer"
    pool.close()
    assert processes_of(os.getpid()) == []


@pytest.mark.slow
def test_a_reaper_that_is_killed_leaves_nothing(attacked, no_namespaces):
    """pytest -m slow tests/rewards/test_hostile.py"""
    pool = attacked(timeout_s=20)
    futures = [pool.submit([request(r)]) for r in ("sleep_beside", "0.5")]
    assert wait_until(lambda: len(processes_of(os.getpid())) == 3, 20)
    first = set(processes_of(os.getpid()))
    os.kill(reaper_of(first), signal.SIGKILL)
    # the cause is unknown: the sample gets a second worker, which is killed too
    assert wait_until(lambda: len(pids := processes_of(os.getpid())) == 3 and first.isdisjoint(pids), 20)
    os.kill(reaper_of(processes_of(os.getpid())), signal.SIGKILL)
    (killed,), (after,) = (future.result(20) for future in futures)
    assert "ended its process by SIGKILL" in killed.error
    assert after.score == 0.5
    pool.close()
    assert processes_of(os.getpid()) == []


def test_limits_name_their_key(attacked):
    limits = Limits(cpu_s=0.2, max_file_mb=4, max_open_files=64)
    attacks = [request(name) for name in ("write_file", "open_files", "burn")]
    written, opened, burned = attacked(timeout_s=5, limits=limits).score_all(attacks)
    assert "wrote a larger file than reward.max_file_mb allows" in written.error
    assert "opened more files than reward.max_open_files allows" in opened.error
    assert "used more processor time than reward.cpu_s=0.2 s allows" in burned.error


def test_what_a_sample_does_to_its_own_process_does_not_last(attacked):
    pool = attacked(timeout_s=5, process_per_sample=True)
    poisoned, healthy = pool.score_all([request("poison"), request("0.5")])
    assert (poisoned.score, healthy.score) == (0.25, 0.5)
    assert len(processes_of(os.getpid())) == 3, "a process of the first sample lives on beside unshare, sh and scorer"


def test_attackers_end_with_a_run_that_is_killed(tmp_path):
    (tmp_path / "attacks.py").write_text(ATTACKS)
    program = textwrap.dedent(
        f"""
        import time
        from verl.data_proto.samples import ScoreRequest
        from verl.rewards.functions import RewardFunctionSpec
        from verl.rewards.pool import RewardPool
        pool = RewardPool(RewardFunctionSpec({str(tmp_path / "attacks.py")!r}), num_workers=1, timeout_s=99, memory_mb=256)
        pool.start()
        pool.submit([ScoreRequest("1", "s", "ignore_sigterm", "")])
        time.sleep(0.3)
        print("ready", flush=True)
        time.sleep(99)
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout.readline() == "ready\n"
        assert len(processes_of(parent.pid)) == 4
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    assert wait_until(lambda: not processes_of(parent.pid))
