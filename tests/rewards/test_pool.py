import os
import shutil
import signal

import numpy as np
import pytest

from tests.processes import is_alive, wait_until
from verl.data_proto.samples import ScoreRequest
from verl.errors import RewardError
from verl.rewards.process import WorkerProcess
from verl.rewards.sandbox.limits import Limits


def request(reply, key=None, **fields):
    return ScoreRequest(key or reply, "unit/test", reply, "gold", **fields)


HARMFUL = {  # reply -> words of the sentence
    "sleep": "took longer than 0.6 s",
    "hang in c": "took longer than 0.6 s",
    "segfault": "SIGSEGV",
    "os._exit": "exit code 3",
    "sys.exit": "SystemExit",
    "memory": "memory_mb",
    "raise": "raised KeyError: 'no such key' (line",
    "deep": "RecursionError",
    "nan": "not a finite number",
    "inf": "not a finite number",
    "none": "returned None",
    "text": "returned a str",
    "no score": "without 'score'",
    "odd part": "whose 'blob' has a object: parts are numbers, text, lists and dicts",
    "huge": "beyond reward.max_abs_score",
    "forge": "wrote to the channel",
}


def test_a_harmful_call_costs_its_own_sample_and_says_why(make_pool):
    good = [str(number / 4) for number in range(len(HARMFUL) + 1)]
    replies = [reply for pair in zip(good, HARMFUL, strict=False) for reply in pair] + good[-1:]
    scored = make_pool(timeout_s=0.6).score_all([request(reply) for reply in replies])
    assert [(s.score, s.error) for s in scored[::2]] == [(float(reply), None) for reply in good]
    for reply, bad in zip(HARMFUL, scored[1::2], strict=True):
        assert bad.score == -0.5
        for word in (HARMFUL[reply], "compute_score", "hostile.py", repr("unit/test"), reply, "default score -0.5"):
            assert word in bad.error


def test_others_go_on_while_a_call_hangs(make_pool):
    pool = make_pool(num_workers=2, timeout_s=600.0)
    pool.start()
    hung, *quick = [pool.submit([request(reply)]) for reply in ("sleep", *map(str, range(20)))]
    pool.wait(quick)
    assert not hung.done(), "the second worker did not take over"


def test_what_a_function_may_return(make_pool):
    returned = {
        "0.5": (0.5, {"acc": 0.5}),
        "dict": (1.0, {"acc": 0.25, "pred": "x", "format": 0.5}),
        "number": (0.25, {"acc": 0.25}),
        "print": (0.75, {"acc": 0.75}),
    }
    scored = make_pool().score_all([request(reply) for reply in returned])
    assert {s.key: (s.score, s.parts) for s in scored} == returned
    assert not any(s.error for s in scored)


def test_extra_keyword_arguments_and_order(make_pool):
    pool = make_pool(kwargs={"bonus": 100}, num_workers=3)
    replies = [str(i) for i in range(200)]
    scores = pool.score_all([request(r) for r in replies])
    assert [s.key for s in scores] == replies
    assert [s.score for s in scores] == [100 + i for i in range(200)]


def test_async_functions(make_pool):
    pool = make_pool("async_score", timeout_s=0.6)
    good, bad, more = pool.score_all([request("1"), request("hang"), request("2")])
    assert (good.score, good.parts) == (1.0, {"half": 0.5})
    assert "took longer" in bad.error
    assert more.score == 2.0


def test_a_batched_function_gets_lists(make_pool):
    pool = make_pool("batch_score", batched=True, timeout_s=0.6)
    scores = pool.score_all([request("a"), request("abcd"), request("nan")])
    assert [s.score for s in scores] == [0.25, 1.0, -0.5]
    assert scores[0].parts == {"size": 3}
    assert "finite" in scores[2].error
    assert all("returned 1 scores for 2 samples" in s.error for s in pool.score_all([request("a"), request("short")]))
    assert all("took longer" in s.error for s in pool.score_all([request("a"), request("hang")]))
    assert pool.score_all([request("ab")])[0].score == 1.0


def test_numpy_values_reach_the_function_as_plain_ones(tmp_path, make_pool):
    path = tmp_path / "types.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert ground_truth == ['a', 'b'] and type(ground_truth) is list, ground_truth\n"
        "    assert extra_info == {'i': 3, 'f': 0.5, 'flag': True, 'deep': [{'x': [1, 2]}]}, extra_info\n"
        "    assert type(extra_info['i']) is int and type(extra_info['flag']) is bool\n"
        "    return 1.0\n"
    )
    extra = {"i": np.int64(3), "f": np.float32(0.5), "flag": np.bool_(True), "deep": ({"x": np.array([1, 2])},)}
    sample = ScoreRequest("k", "s", "r", np.array(["a", "b"], dtype=object), extra)
    (score,) = make_pool(path=str(path)).score_all([sample])
    assert score.error is None
    assert score.score == 1.0


def test_bytes_are_refused_with_the_sample_named(make_pool):
    pool = make_pool("batch_score", batched=True)
    good, bad = request("a"), request("b", key="7/1", extra_info={"image": b"\x00"})
    with pytest.raises(RewardError, match=r"Sample 7/1 of data_source 'unit/test'.*type bytes.*path"):
        pool.submit([good, bad])


def test_prints_go_to_the_log(make_pool, tmp_path):
    pool = make_pool(log_dir=tmp_path / "logs", limits=Limits(max_output_kb=256))
    pool.score_all([request("print")])
    text = (tmp_path / "logs" / "reward_worker_0.log").read_text()
    assert "to stdout" in text
    assert "child" in text


def test_prints_begin_nothing_in_a_folder_that_is_gone(make_pool, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    pool = make_pool(log_dir=run / "logs")
    pool.start()
    shutil.rmtree(run)
    (score,) = pool.score_all([request("print")])
    assert score.error is None
    assert not run.exists()


def test_limits_do_not_count_what_importing_took(make_pool):
    (score,) = make_pool(memory_mb=8).score_all([request("1")])
    assert score.error is None


def test_workers_start_when_requests_have_to_wait(make_pool):
    pool = make_pool(num_workers=4)
    pool.score_all([request(str(i)) for i in range(50)])
    assert len(pool._processes) == 1, "a fast function needs one process"


def test_a_worker_that_dies_between_calls_costs_nothing(make_pool):
    pool = make_pool()
    pool.start()
    pid = pool._processes[0].pid
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not is_alive(pid))
    assert pool.score_all([request("1")])[0].error is None


def test_close_is_idempotent_ends_workers_and_running_calls(make_pool):
    pool = make_pool(timeout_s=60)
    running, waiting = pool.submit([request("sleep")]), pool.submit([request("1")])
    pid = pool._processes[0].pid
    assert wait_until(lambda: len(pool._queue._jobs) == 1)
    pool.close()
    pool.close()
    assert not is_alive(pid)
    assert "the run is ending" in running.result(120)[0].error
    assert "the run is ending" in waiting.result(0)[0].error
    with pytest.raises(RewardError, match="closed already"):
        pool.submit([request("1")])


def test_a_worker_that_is_killed_while_it_starts_is_started_again(make_pool, around, caplog):
    """Twice is too often: then something of the machine or the function ends it."""
    kills = [1]

    def killed(exchange, self, *arguments, **named):
        if kills and kills.pop():
            os.killpg(self.pid, signal.SIGKILL)
        return exchange(self, *arguments, **named)

    around(WorkerProcess, "_exchange", killed)
    (score,) = make_pool().score_all([request("0.5")])
    assert (score.score, score.error) == (0.5, None)
    assert "A reward worker is started again. The reward worker did not start" in caplog.text
    kills[:] = [1, 1]
    with pytest.raises(RewardError, match="did not start"):
        make_pool().start()


def test_many_callers_at_once_each_get_their_own_scores(make_pool):
    """Threads submit while one scorer in ten crashes: every future ends, in its own order."""
    from concurrent.futures import ThreadPoolExecutor

    pool = make_pool(num_workers=2, timeout_s=5)
    pool.start()

    def one(caller):
        replies = ["os._exit" if i == caller else str(caller * 100 + i) for i in range(10)]
        return pool.score_all([request(r, key=f"{caller}/{i}") for i, r in enumerate(replies)])

    with ThreadPoolExecutor(4) as threads:
        for caller, scores in enumerate(threads.map(one, range(4))):
            assert [s.key for s in scores] == [f"{caller}/{i}" for i in range(10)]
            assert [s.score for i, s in enumerate(scores) if i != caller] == [
                caller * 100 + i for i in range(10) if i != caller
            ]
            assert "exit code 3" in scores[caller].error


def test_a_function_file_that_vanishes_is_reported_not_raised(make_pool, hostile, caplog):
    pool = make_pool()
    pool.start()
    os.remove(hostile)
    scores = pool.score_all([request("os._exit"), request("1")])
    assert "exit code 3" in scores[0].error
    assert "does not exist" in scores[1].error
    assert "could not be started again" in caplog.text


def test_a_function_file_that_changes_is_said(make_pool, hostile, caplog):
    pool = make_pool()
    pool.start()
    with open(hostile, "a") as file:
        file.write("\ncompute_score = lambda **sample: 7\n")
    scores = pool.score_all([request("os._exit"), request("1")])
    assert scores[1].score == 7.0
    assert "changed during the run" in caplog.text
