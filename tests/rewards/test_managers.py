import dataclasses
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.config import CustomRewardFunctionConfig, RewardConfig, RewardManagerConfig
from verl.data_proto.samples import ScoreRequest
from verl.errors import ConfigError
from verl.rewards.managers import REWARD_MANAGERS, RewardManager, build_reward_manager
from verl.rewards.managers.dapo import OverlongBuffer, overlong_penalty

FUNCTIONS = """
import os

def one(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "crash":
        os._exit(1)
    return {"score": float(solution_str), "acc": solution_str == ground_truth, "format": 0.5}

def sometimes(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "bare":
        return 1.0
    if solution_str == "text":
        return {"score": 1.0, "format": "good"}
    return one(data_source, solution_str, ground_truth)

def plain(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str)

def many(data_sources, solution_strs, ground_truths, extra_infos):
    rows = zip(data_sources, solution_strs, ground_truths, extra_infos)
    return [{"error": 0} if row[1] == "crash" else one(*row) for row in rows]

def sizes(data_sources, solution_strs, ground_truths, extra_infos):
    return [len(solution_strs)] * len(data_sources)
"""


def request(reply, key=None, length=10):
    return ScoreRequest(key or reply, "s", reply, "1", response_length=length)


def section(cls, **fields):
    return dataclasses.replace(cls(), **fields)


@pytest.fixture
def build(tmp_path):
    """build(manager, function="one", **reward_kwargs), closed after the test."""
    managers = []
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)

    def make(name, function="one", module=None, parts=(), **reward_kwargs):
        manager = section(RewardManagerConfig, name=name)
        if module is not None:
            place = dataclasses.replace(manager.module, path=str(module))
            manager = dataclasses.replace(manager, source="importlib", module=place)
        config = section(
            RewardConfig,
            num_workers=2,
            timeout_s=5.0,
            memory_mb=256,
            default_score=-2.0,
            custom_reward_function=section(CustomRewardFunctionConfig, path=str(path), name=function),
            reward_manager=manager,
            reward_kwargs=reward_kwargs,
        )
        managers.append(build_reward_manager(config, max_response_length=100, parts=parts))
        return managers[-1]

    yield make
    for manager in managers:
        manager.close()


@pytest.mark.parametrize("name", list(REWARD_MANAGERS))
def test_contract(build, name, caplog):
    manager = build(name, "many" if name == "batch" else "one")
    assert isinstance(manager, RewardManager)
    manager.start(["s"])
    for reply in ("1", "0.5", "crash", "0.25"):
        manager.submit(request(reply))
    with pytest.raises(ValueError, match="being scored already"):
        manager.submit(request("1"))
    with pytest.raises(KeyError, match="was not submitted"):
        manager.collect(["1", "never"])
    scores = manager.collect(["0.5", "crash", "1"])
    assert list(scores) == ["0.5", "crash", "1"]
    assert [scores[k].score for k in scores] == [0.5, -2.0, 1.0]
    assert scores["1"].parts == {"acc": True, "format": 0.5}
    assert scores["crash"].parts == {}, "a defaulted sample has no parts of others"
    assert "sample crash" in scores["crash"].error
    assert scores["crash"].error in caplog.text
    assert manager.num_defaulted == 1
    assert manager.collect(["0.25"])["0.25"].score == 0.25
    with pytest.raises(KeyError):
        manager.collect(["1"])
    assert [s.score for s in manager.score([request("3"), request("1"), request("2")])] == [3.0, 1.0, 2.0]
    manager.submit(request("1"))  # a key may come again once collected
    manager.close()
    manager.close()


def test_few_warnings_for_many_failures(build, caplog):
    manager = build("naive")
    manager.score([request("not a number", key=str(i)) for i in range(20)])
    assert manager.num_defaulted == 20
    assert len([r for r in caplog.records if "default score" in r.message]) == 5
    assert "15 more" in caplog.text


def test_batch_calls_once_over_what_is_collected(build):
    manager = build("batch", "sizes")
    assert [s.score for s in manager.score([request(str(i)) for i in range(7)])] == [7.0] * 7


@pytest.mark.parametrize(("length", "penalty"), [(10, 0.0), (80, 0.0), (81, -0.025), (90, -0.25), (100, -0.5)])
def test_dapo_punishes_the_last_tokens(build, length, penalty):
    buffer = {"enable": True, "len": 20, "penalty_factor": 0.5, "log": True}
    (score,) = build("dapo", overlong_buffer_cfg=buffer, max_resp_len=None).score([request("1", length=length)])
    assert score.score == pytest.approx(1.0 + penalty)
    assert score.parts["overlong_reward"] == pytest.approx(penalty)
    assert score.parts["overlong"] is (penalty < 0)
    assert score.parts["unshaped_score"] + score.parts["overlong_reward"] == pytest.approx(score.score)
    assert score.parts["acc"] is True


def test_dapo_off_silent_and_own_limit(build):
    assert (
        build("dapo", overlong_buffer_cfg={"enable": False, "len": 0}).score([request("1", length=100)])[0].score == 1
    )
    quiet = build("dapo", overlong_buffer_cfg={"enable": True, "len": 10, "penalty_factor": 1.0}, max_resp_len=50)
    (score,) = quiet.score([request("1", length=50)])
    assert score.score == 0.0
    assert score.parts == {"acc": True, "format": 0.5, "unshaped_score": 1.0}


@given(st.integers(1, 300), st.integers(0, 300), st.floats(0.1, 4))
def test_overlong_penalty_follows_the_paper(buffer_len, length, factor):
    maximum = 300
    penalty = overlong_penalty(length, maximum, OverlongBuffer(True, buffer_len, factor))
    if length <= maximum - buffer_len:
        assert penalty == 0
    else:  # DAPO, equation 13: ((L_max - L_cache) - |y|) / L_cache
        assert penalty == pytest.approx(factor * ((maximum - buffer_len) - length) / buffer_len)
        assert -factor - 1e-9 <= penalty < 0


@pytest.mark.parametrize(
    ("name", "kwargs", "sentence"),
    [
        ("dapo", {"overlong_buffer_cfg": {"enable": True, "len": 101}}, "between 1 and max_resp_len=100"),
        ("dapo", {"overlong_buffer_cfg": {"enable": True, "lenn": 1}}, "lenn; did you mean 'len'"),
        ("dapo", {"max_resp_length": 10}, "does not take.*max_resp_length"),
        ("naive", {"overlong_buffer_cfg": {}}, "naive.*does not take"),
        ("navie", {}, "did you mean 'naive'"),
    ],
)
def test_refused_settings(build, name, kwargs, sentence):
    with pytest.raises(ConfigError, match=sentence):
        build(name, **kwargs)


def test_gdpo_needs_several_numbers(build):
    with pytest.raises(
        ConfigError, match=r"plain of .*returned no number beside its score, which.*returned score, acc"
    ):
        build("gdpo", "plain").score([request("1")])


def test_a_sample_without_a_part_that_the_run_reads_gets_the_default_score(build):
    manager = build("naive", "sometimes", parts=["format"])
    with pytest.raises(ConfigError, match=r"returned no number named 'format', which .*; it returned score, acc"):
        manager.score([request("bare")])
    full, bare, text, crash = manager.score([request(reply) for reply in ("1", "bare", "text", "crash")])
    assert (full.score, full.parts["format"]) == (1.0, 0.5)
    for score in (bare, text, crash):
        assert (score.score, score.parts) == (-2.0, {"format": -2.0})
    assert "returned no number named 'format', for sample bare" in bare.error
    assert manager.num_defaulted == 3
    assert manager.score([request("bare")])[0].score == -2.0, "the function has been seen to return it"


def test_what_a_manager_makes_of_a_score_has_the_same_limits(build, tmp_path):
    path = tmp_path / "managers.py"
    path.write_text(
        "from dataclasses import replace\n"
        "from verl.rewards.managers.naive import NaiveRewardManager\n"
        "class Inverse(NaiveRewardManager):\n"
        "    def shape(self, request, score):\n"
        "        return replace(score, score=1 / score.score if score.score else float('inf'))\n"
    )
    half, zero = build("Inverse", module=path).score([request("0.5"), request("0")])
    assert (half.score, half.error) == (2.0, None)
    assert (zero.score, zero.parts) == (-2.0, {})
    assert "and its manager returned inf as 'score', which is not a finite number" in zero.error


def test_a_function_that_fails_on_every_row_still_gives_what_the_run_reads(build):
    (score,) = build("naive", parts=["acc"]).score([request("crash")])
    assert score.parts == {"acc": -2.0}


MANAGERS = """
from dataclasses import replace
from verl.rewards.managers.naive import NaiveRewardManager
from verl.workers.reward_manager import register

class Shorter(NaiveRewardManager):
    def __init__(self, pool, *, max_response_length, cost=0.01):
        super().__init__(pool, max_response_length=max_response_length)
        self.cost = cost

    def shape(self, request, score):
        return replace(score, score=score.score - self.cost * request.response_length)

class Other:
    def __init__(self, pool): ...
"""


def test_a_manager_of_ones_own(build, tmp_path):
    path = tmp_path / "managers.py"
    path.write_text(textwrap.dedent(MANAGERS))
    assert build("Shorter", module=path, cost=0.05).score([request("1")])[0].score == pytest.approx(0.5)
    with pytest.raises(ConfigError, match=r"'Other' has no method 'start'.*__call__\(batch, return_dict\)"):
        build("Other", module=path)
    with pytest.raises(ConfigError, match="did you mean 'Shorter'"):
        build("Shorterr", module=path)


def test_the_builtin_scorers_by_default():
    manager = build_reward_manager(RewardConfig(), max_response_length=8)
    try:
        manager.start(["openai/gsm8k"])
        sample = ScoreRequest("k", "openai/gsm8k", "so #### 1,000", "1000")
        assert manager.score([sample])[0].score == 1.0
    finally:
        manager.close()


def test_registering_through_the_known_door():
    from verl.rewards.managers.naive import NaiveRewardManager
    from verl.workers.reward_manager import register

    class Mine(NaiveRewardManager):
        pass

    try:
        register("a manager of this test")(Mine)
        assert REWARD_MANAGERS.get("a manager of this test") is Mine
    finally:
        REWARD_MANAGERS._rows.pop("a manager of this test", None)


LISTS = """
def compute_score(completions, ground_truth, level, scale=1.0, **columns):
    assert all(isinstance(text, str) for text in completions)
    return [scale * len(completions) * (text == answer) + n for text, answer, n in zip(completions, ground_truth, level)]
"""


@pytest.mark.parametrize(("manager", "num_at_once"), [("naive", 2), ("batch", 2), ("dapo", 1)])
def test_a_file_may_have_a_function_of_lists_as_in_trl(manager, num_at_once, tmp_path):
    """All samples at once, but for a manager that shapes one sample after the other. The default manager gives all."""
    file = tmp_path / "lists.py"
    file.write_text(LISTS)
    custom = CustomRewardFunctionConfig(path=str(file), reward_kwargs={"scale": 10.0})
    config = RewardConfig(
        custom_reward_function=custom, reward_manager=RewardManagerConfig(name=manager), num_workers=1
    )
    built = build_reward_manager(config, max_response_length=8)
    built.start()
    scores = built.score([ScoreRequest(f"{n}/0", "task", text, "4", {"level": n}) for n, text in enumerate("45")])
    built.close()
    assert [(score.score, score.error) for score in scores] == [(10.0 * num_at_once, None), (1.0, None)]
