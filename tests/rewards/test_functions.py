import sys

import pytest

from verl.errors import RewardError
from verl.rewards.functions import RewardFunctionSpec, load_reward_function
from verl.rewards.pool import RewardPool


def start(spec):
    with RewardPool(spec, num_workers=1, timeout_s=5, memory_mb=256):
        pass


BROKEN = {
    "wrong_names": (
        "def compute_score(source, text, truth): return 1",
        r"compute_score of .*f\.py has the signature \(source, text, truth\).*"
        r"called by keyword as compute_score\(data_source,",
    ),
    "one_more": (
        "def compute_score(data_source, solution_str, ground_truth, extra_info, tokenizer): return 1",
        r"tokenizer.*missing a required argument: 'tokenizer'",
    ),
    "not_there": ("def compute_scores(**kw): return 1", "no reward function 'compute_score'; did you mean"),
    "not_callable": ("compute_score = 3", "is a int, not a function"),
    "syntax": ("def compute_score(:", "cannot be loaded.*SyntaxError"),
    "import": ("import not_a_module_anywhere", "No module named 'not_a_module_anywhere'"),
    "exits": ("import sys; sys.exit(0)", "raised SystemExit"),
    "crashes": ("import os; os._exit(9)", "did not start.*exit code 9"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_an_unusable_function_is_refused_before_the_run(tmp_path, case):
    source, sentence = BROKEN[case]
    path = tmp_path / "f.py"
    path.write_text(source)
    with pytest.raises(RewardError, match=sentence):
        start(RewardFunctionSpec(str(path)))


@pytest.mark.parametrize("parameters", ["solution_str, ground_truth", "solution_str, ground_truth, method='strict'"])
def test_a_function_of_reply_and_answer(tmp_path, parameters):
    path = tmp_path / "f.py"
    path.write_text(f"def compute_score({parameters}): return {{'score': solution_str == ground_truth}}")
    arguments = {"data_source": "countdown", "solution_str": "3", "ground_truth": "3", "extra_info": {}}
    assert load_reward_function(RewardFunctionSpec(str(path)))(**arguments) == {"score": True}
    with pytest.raises(RewardError, match="unexpected keyword argument 'penalty'"):
        load_reward_function(RewardFunctionSpec(str(path), kwargs={"penalty": 1}))


def test_a_missing_file_and_reward_kwargs_that_it_does_not_take(tmp_path):
    with pytest.raises(RewardError, match=r"custom_reward_function\.path=.*nowhere\.py.*does not exist"):
        start(RewardFunctionSpec(str(tmp_path / "nowhere.py")))
    path = tmp_path / "f.py"
    path.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1")
    with pytest.raises(RewardError, match=r"reward_kwargs \['penalty'\].*unexpected keyword argument 'penalty'"):
        start(RewardFunctionSpec(str(path), kwargs={"penalty": 1}))


def test_a_batched_function_needs_the_plural_names(tmp_path):
    path = tmp_path / "f.py"
    path.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1")
    with pytest.raises(RewardError, match="data_sources, solution_strs"):
        start(RewardFunctionSpec(str(path), batched=True))


@pytest.mark.parametrize("prefix", ["", "pkg://"])
def test_a_dotted_module_on_the_parents_path(tmp_path, monkeypatch, prefix):
    (tmp_path / "my_rewards.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None): return 1"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    start(RewardFunctionSpec(f"{prefix}my_rewards", "score"))
    assert "my_rewards" not in sys.modules, "the user's code is imported in the worker only"


def test_the_builtin_functions():
    assert load_reward_function(RewardFunctionSpec()).__name__ == "default_compute_score"
    assert load_reward_function(RewardFunctionSpec(batched=True)).__name__ == "default_compute_scores"
    with RewardPool(RewardFunctionSpec(), num_workers=1, timeout_s=5, memory_mb=256) as pool:
        pool.close()
    unknown = RewardPool(RewardFunctionSpec(), num_workers=1, timeout_s=5, memory_mb=256)
    with pytest.raises(RewardError, match=r"'openai/gsm8'; did you mean 'openai/gsm8k'.*custom_reward_function\.path"):
        unknown.start(["openai/gsm8"])
