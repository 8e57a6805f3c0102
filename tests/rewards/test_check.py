import dataclasses

import pytest

from verl.config import CustomRewardFunctionConfig, RewardConfig, RewardManagerConfig
from verl.errors import RewardError
from verl.rewards.check import check_references


def row(source, gold, **extra_info):
    return {"data_source": source, "reward_model": {"style": "rule", "ground_truth": gold}, "extra_info": extra_info}


def custom(tmp_path, source, manager="naive"):
    path = tmp_path / "f.py"
    path.write_text(source)
    return dataclasses.replace(
        RewardConfig(),
        custom_reward_function=dataclasses.replace(CustomRewardFunctionConfig(), path=str(path)),
        reward_manager=dataclasses.replace(RewardManagerConfig(), name=manager),
    )


def test_good_rows_pass():
    rows = [row("openai/gsm8k", "18"), row("openai/gsm8k", "1,000"), row("lighteval/MATH", "\\frac12")]
    rows += [row("reasoning_gym/gcd", "4", question="q", answer="4", metadata="{}", task="gcd")]
    report = check_references(rows, RewardConfig())
    assert all(source.level != "fail" for source in report)
    assert [(s.data_source, s.num_rows, s.num_full, s.level) for s in report] == [
        ("openai/gsm8k", 2, 2, "pass"),
        ("lighteval/MATH", 1, 1, "pass"),
        ("reasoning_gym/gcd", 1, 1, "pass"),
    ]
    assert report[0].sentence == "openai/gsm8k: 2 of 2 reference answers get 1 (mean 1.000)."


def test_a_ground_truth_that_cannot_be_reached_fails_with_its_row():
    report = check_references([row("openai/gsm8k", "18"), row("openai/gsm8k", "eighteen")], RewardConfig())
    (source,) = report
    assert any(source.level == "fail" for source in report)
    assert (source.level, source.num_full) == ("fail", 1)
    assert source.failures == ["row 1 of openai/gsm8k: the reference '#### eighteen' gets 0, not 1."]


def test_rows_without_a_reference_answer_are_said():
    report = check_references([row("reasoning_gym/rush_hour", None, metadata="{}", answer=None)], RewardConfig())
    assert all(source.level != "fail" for source in report)
    assert report[0].level == "warn"
    assert "1 rows have no reference answer" in report[0].sentence


def test_unknown_data_source_is_an_error():
    with pytest.raises(RewardError, match="no built-in scorer for data_source 'mine'"):
        check_references([row("mine", "1")], RewardConfig())


def test_a_function_of_ones_own_gets_the_ground_truth(tmp_path):
    source = "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1 / len(solution_str)"
    report = check_references([row("mine", "ab"), row("mine", "abcd"), row("mine", "")], custom(tmp_path, source))
    (checked,) = report
    assert all(source.level != "fail" for source in report)
    assert (checked.level, checked.num_errors, checked.num_full) == ("warn", 1, 0)
    assert checked.score_sum == 0.75
    assert "ZeroDivisionError" in checked.failures[0]


def test_a_function_that_always_fails(tmp_path):
    source = "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return solution_str"
    report = check_references([row("mine", "ab"), row("mine", "cd")], custom(tmp_path, source))
    assert any(source.level == "fail" for source in report)
    assert "failed on 2" in report[0].sentence


def test_a_batched_function_is_checked_in_pieces(tmp_path):
    source = (
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    assert len(solution_strs) <= 64\n"
        "    return [1.0] * len(solution_strs)\n"
    )
    report = check_references([row("mine", str(i)) for i in range(150)], custom(tmp_path, source, "batch"))
    assert report[0].num_full == 150
