"""The reward model's result reaches the reward function, with or without a rule, one by one or in lists."""

import pytest

from verl.config import CustomRewardFunctionConfig, RewardConfig, RewardManagerConfig, RewardModelConfig
from verl.data_proto.samples import ScoreRequest
from verl.errors import RewardError
from verl.rewards.managers import build_reward_manager, function_spec

COMBINED = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, reward_model_score=0.0):
    return {"score": reward_model_score + float(ground_truth in solution_str), "model": reward_model_score}

def parse(data_source, solution_str, ground_truth, extra_info=None, *, reward_model_reply):
    return {"yes": 1.0, "no": 0.0}[reward_model_reply.strip()]

def rule_only(data_source, solution_str, ground_truth, extra_info=None):
    return 0.0

def many(data_sources, solution_strs, ground_truths, extra_infos, reward_model_scores):
    return [2 * s for s in reward_model_scores]
"""


@pytest.fixture
def scored(tmp_path):
    """scored(says, judge=, function=, manager=) -> the scores of samples after the model replied `says`."""
    (tmp_path / "rewards.py").write_text(COMBINED)

    def run(says, *, judge=False, function=None, manager="naive"):
        custom = CustomRewardFunctionConfig(path=str(tmp_path / "rewards.py"), name=function) if function else None
        config = RewardConfig(
            num_workers=1,
            reward_manager=RewardManagerConfig(name=manager),
            reward_model=RewardModelConfig(enable=True, judge_template="{response}" if judge else None),
            **({"custom_reward_function": custom} if custom else {}),
        )
        built = build_reward_manager(config, max_response_length=8)
        built.start(["no scorer has this name"])
        name = "reward_model_reply" if judge else "reward_model_score"
        try:
            return built.score(
                [
                    ScoreRequest(f"train/{i}/0", "unknown", f"answer {i}", "1", from_model={name: said})
                    for i, said in enumerate(says)
                ]
            )
        finally:
            built.close()

    return run


@pytest.mark.parametrize("manager", ["naive", "batch", "dapo"])
def test_the_classifier_score_is_the_reward(scored, manager):
    scores = scored([0.25, -1.5], manager=manager)
    assert [s.score for s in scores] == [0.25, -1.5]
    assert all(s.error is None for s in scores)


def test_a_function_combines_rule_and_model(scored):
    scores = scored([0.25, 0.5], function="compute_score")
    assert [s.score for s in scores] == [0.25, 1.5]
    assert [s.parts["model"] for s in scores] == [0.25, 0.5]


def test_a_batched_function_gets_lists(scored):
    assert [s.score for s in scored([0.25, 0.5], function="many", manager="batch")] == [0.5, 1.0]


@pytest.mark.parametrize("manager", ["naive", "batch"])
def test_the_last_number_of_a_judge_counts_and_a_reply_without_one_costs_its_sample(scored, manager):
    scores = scored(["I give 3 of 10. Score: **7.5** / 10", "well written", "-2"], judge=True, manager=manager)
    assert [s.score for s in scores] == [7.5, 0.0, -2.0]
    assert [s.error is None for s in scores] == [True, False, True]
    assert scores[0].parts["reply"].startswith("I give")


def test_a_function_parses_the_judge(scored):
    scores = scored(["yes", " no", "maybe"], judge=True, function="parse")
    assert [s.score for s in scores] == [1.0, 0.0, 0.0]
    assert "KeyError" in scores[2].error


def test_a_function_that_would_not_see_the_model_is_refused(scored):
    with pytest.raises(RewardError, match="no parameter 'reward_model_score'.*would not get"):
        scored([0.1], function="rule_only")


def test_without_a_reward_model_nothing_is_added():
    assert function_spec(RewardConfig()).from_model is None


def test_parts_of_a_graded_or_compared_reply_are_read(scored):
    says = ["I prefer B.\n\nA\njudge/order_agreement: 1.0000\nScore: 0.5000", "judge/facts: 7.0000\nScore: nan"]
    good, bad = scored(says, judge=True)
    assert (good.score, good.parts["judge/order_agreement"]) == (0.5, 1.0)
    assert bad.error
    (again,) = scored(says[:1], judge=True, manager="batch")
    assert again.parts["judge/order_agreement"] == 1.0
