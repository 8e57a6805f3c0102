"""A sample pays for nothing but its own call: not for what earlier ones left in its worker, nor for signals from outside."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import psutil
import pytest

from tests.rewards.attacks import ATTACKS, chain_of_scorer, processes_of
from tests.rewards.test_pool import request, wait_until
from verl.rewards.sandbox import launch
from verl.rewards.sandbox.limits import Limits

# {attack of the first sample, with effects that remain: later sample that must keep its score}
LEFT_BEHIND = {
    "print_for_ever": "print_own",
    "keep_files": "open_file",
    "keep_memory": "allocate_some",
    "keep_processes": "start_processes",
    "keep_the_interpreter": "wait",
    "end_later": "wait",
    "forge_later": "wait",
}


@pytest.mark.parametrize("first", LEFT_BEHIND)
def test_what_a_sample_leaves_behind_costs_no_later_one(attacked, first, tmp_path):
    pool = attacked(timeout_s=3.0, log_dir=tmp_path)  # a busy machine is slow to start a process or to write memory
    info = {"text": "0123"} if LEFT_BEHIND[first] == "print_own" else {}
    pool.score_all([request(first)])
    later = pool.score_all([request(LEFT_BEHIND[first], key=str(i), extra_info=info) for i in range(2)])
    assert [(s.score, s.error) for s in later] == [(0.5, None)] * 2


def test_processes_of_the_tick_in_which_a_call_begins_may_be_of_an_earlier_sample(monkeypatch):
    """/proc counts starts in hundredths of a second."""
    monkeypatch.setattr(launch, "start_ticks", lambda folders: [6, 7, 7, 7])
    sandbox = SimpleNamespace(limits=Limits(max_processes=2), _num_own=1, _processes=lambda limit: [])
    assert launch.Sandbox.has_too_many_since(sandbox, 6)
    assert not launch.Sandbox.has_too_many_since(sandbox, 7)


def test_prints_are_limited_for_each_sample_and_clean(attacked, tmp_path):
    limits = Limits(max_file_mb=1, max_output_kb=4)
    pool = attacked(timeout_s=5, limits=limits, log_dir=tmp_path)
    forged = "\x1b[2J\x9b31m\0" + "z" * 100
    scores = pool.score_all(
        [
            *(request("flood_log", key=str(i)) for i in range(8)),
            *(request("print_own", key=f"own {i}", extra_info={"text": forged}) for i in range(3)),
        ]
    )
    assert [s.error for s in scores] == [None] * 11
    pool.close()
    text = (tmp_path / "reward_worker_0.log").read_text(encoding="utf-8")
    assert text.count("dropped the rest: reward.max_output_kb=4") == 8
    assert text.count("\\x1b[2J\\x9b31m\\x00" + "z" * 100 + "\na longer line yyy") == 3
    assert all(c.isprintable() or c in "\n\t" for c in text)


def test_a_log_that_a_scorer_replaced_is_not_followed(attacked, tmp_path):
    real_log = tmp_path / "kept"
    real_log.write_text("x" * 100)
    (tmp_path / "reward_worker_0.log").symlink_to(real_log)
    pool = attacked(timeout_s=5, log_dir=tmp_path)
    pool.score_all([request("print_own", extra_info={"text": "1"})])
    pool.close()
    assert real_log.read_text() == "x" * 100
    assert (tmp_path / "reward_worker_0.log").read_text().startswith("1\n")


def test_text_of_a_scorer_is_clean_where_it_is_stored_and_logged(attacked, caplog):
    stored, failed = attacked(timeout_s=5).score_all([request("surrogate"), request("raise_forged")])
    assert stored.parts == {"\\ud800": "\\ud800"}
    assert "raised ValueError: \\x1b[2J 2026-01-01 00:00:00 ERROR verl: a forged line \\ud800 (line" in failed.error
    assert failed.error.isprintable()


SIGNALS = [signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL, signal.SIGINT]
FAST = [
    ("unshare", signal.SIGSTOP),
    ("process 1", signal.SIGKILL),
    ("scorer", signal.SIGSTOP),
    ("scorer", signal.SIGTERM),
]


@pytest.mark.parametrize(
    ("which", "number"),
    [
        pytest.param(which, number, marks=() if (which, number) in FAST else pytest.mark.slow)
        for which in ("unshare", "process 1", "scorer")
        for number in SIGNALS
    ],
)
def test_a_signal_from_outside_costs_no_sample(attacked, caplog, scoring, which, number):
    scoring(attacked(timeout_s=1), lambda pool: chain_of_scorer(pool)[which], number)
    if which == "scorer" and number != signal.SIGINT:
        assert ("was stopped by a signal" if number == signal.SIGSTOP else number.name) in caplog.text


@pytest.fixture
def scoring(around, tmp_path):
    """scoring(pool, pid_of, number): a process of the pool gets a signal while a sample is scored."""

    def send(pool, pid_of, number):
        pool.start()
        call = pool.submit([request("wait", extra_info={"began": str(tmp_path / "began")})])
        assert wait_until((tmp_path / "began").exists)
        os.kill(pid_of(pool), number)
        (score,) = call.result(120)
        assert (score.score, score.error) == (0.5, None)
        ends = []
        around(launch.Sandbox, "how_it_ended", lambda end, *words: ends.append(end(*words)) or ends[-1])
        pool.close()
        assert None not in ends, "a stopped process must be continued to end"
        assert processes_of(os.getpid()) == []

    return send


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("which", ["reaper", "scorer"])
def test_a_signal_from_outside_costs_no_sample_without_namespaces(attacked, no_namespaces, scoring, which, number):
    """pytest -m slow tests/rewards/test_hostile.py"""

    def pid_of(pool):
        reaper = psutil.Process(pool._processes[0].pid)
        return (reaper if which == "reaper" else reaper.children()[0]).pid

    scoring(attacked(timeout_s=1), pid_of, number)


def test_a_process_that_the_function_forks_answers_nothing(attacked):
    (score,) = attacked(timeout_s=5).score_all([request("answer_from_fork")])
    assert (score.score, score.error) == (0.75, None)


def test_a_fork_that_is_killed_from_outside_is_scored_again(attacked):
    pool = attacked(timeout_s=5, process_per_sample=True)
    pool.start()
    call = pool.submit([request("wait")])
    forked = []
    scorer = psutil.Process(chain_of_scorer(pool)["scorer"])
    assert wait_until(lambda: forked.extend(scorer.children()) or forked)
    forked[0].kill()
    (score,) = call.result(120)
    assert (score.score, score.error) == (0.5, None)


def test_the_time_of_a_run_that_is_stopped_itself_does_not_count(tmp_path):
    (tmp_path / "attacks.py").write_text(ATTACKS)
    program = textwrap.dedent(
        f"""
        from verl.data_proto.samples import ScoreRequest
        from verl.rewards.functions import RewardFunctionSpec
        from verl.rewards.pool import RewardPool
        spec = RewardFunctionSpec({str(tmp_path / "attacks.py")!r})
        with RewardPool(spec, num_workers=1, timeout_s=1.5, memory_mb=256) as pool:
            info = {{"seconds": 2.5, "began": {str(tmp_path / "began")!r}}}
            call = pool.submit([ScoreRequest("1", "s", "wait", "", info)])
            (score,) = call.result(120)
            print(score.score, score.error, flush=True)
        """
    )
    run = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert wait_until((tmp_path / "began").exists)
        os.kill(run.pid, signal.SIGSTOP)
        time.sleep(2)  # more than the sample may take; it needs a little longer still
        os.kill(run.pid, signal.SIGCONT)
        assert run.stdout.readline() == "0.5 None\n"
    finally:
        run.kill()
        run.wait()
        run.stdout.close()


def test_a_scorer_that_computes_between_samples_is_ended(attacked, caplog):
    pool = attacked(timeout_s=1, limits=Limits(cpu_s=0.5))
    pool.score_all([request("keep_burning")])
    assert wait_until(lambda: "Between two samples the scorer used more processor time" in caplog.text)
    assert pool.score_all([request("0.5")])[0].score == 0.5


def test_what_a_scorer_writes_after_its_answer_costs_nobody_a_sample(attacked, caplog, tmp_path):
    pool = attacked(timeout_s=5)
    (first,) = pool.score_all([request("write_later", extra_info={"folder": str(tmp_path)})])
    (tmp_path / "answered").touch()
    assert wait_until((tmp_path / "written").exists)
    (second,) = pool.score_all([request("0.5")])
    assert (first.score, first.error) == (0.25, None)
    assert (second.score, second.error) == (0.5, None)
    assert "Between two samples the scorer wrote to the channel" in caplog.text
