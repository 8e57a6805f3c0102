"""Reward functions that ask the service of a reward model themselves, by its address and its tokenizer."""

from dataclasses import replace

import pytest

from verl.config import RewardConfig, RewardModelConfig
from verl.config.sections.reward import CustomRewardFunctionConfig, JudgeServiceConfig, RewardModelRolloutConfig
from verl.data_proto.samples import ScoreRequest
from verl.errors import ConfigError, RewardError
from verl.rewards.functions import service_arguments
from verl.rewards.managers.build import asks_service, build_reward_manager, function_spec, serves_judge

FUNCTION = """
async def compute_score(
    data_source, solution_str, ground_truth, extra_info=None, *, reward_router_address, reward_model_tokenizer=None
):
    host, port = reward_router_address.split(":")
    return {"score": len(reward_model_tokenizer(solution_str)["input_ids"]), "port": int(port), "local": host == "localhost"}
"""


@pytest.fixture
def section(tmp_path, tiny_llama):
    """make(**keys) -> the section of a function with both parameters, and a service."""
    file = tmp_path / "asks.py"
    file.write_text(FUNCTION)

    def make(name="http", enable=True, **keys):
        service = JudgeServiceConfig(url="http://localhost:8123/v1")
        return RewardConfig(
            custom_reward_function=CustomRewardFunctionConfig(path=str(file)),
            reward_model=RewardModelConfig(
                enable=enable, model_path=str(tiny_llama), rollout=RewardModelRolloutConfig(name=name, service=service)
            ),
            num_workers=1,
            **keys,
        )

    return make


def test_address_and_tokenizer_reach_the_function(section):
    config = section(network=True, debug=True)
    assert asks_service(config)
    manager = build_reward_manager(config, max_response_length=8)
    manager.start()
    (score,) = manager.score([ScoreRequest("0/0", "task", "abcd", "4")])
    manager.close()
    assert (score.score, score.error) == (4.0, None)
    assert score.parts["port"] == 8123
    assert score.parts["local"]


def test_a_service_out_of_reach_is_refused(section):
    with pytest.raises(ConfigError, match="service of the reward model itself"):
        function_spec(section(name="http", network=False))


@pytest.mark.parametrize(("name", "url", "serves"), [
    ("native", None, True), ("vllm", None, True), ("sglang", None, True), ("sglang", "http://x", False), ("http", None, False),
])  # fmt: skip
def test_the_run_serves_a_judge_that_is_nowhere_else(section, name, url, serves):
    config = section(name=name)
    rollout = replace(config.reward_model.rollout, service=JudgeServiceConfig(**({"url": url} if url else {})))
    assert serves_judge(replace(config, reward_model=replace(config.reward_model, rollout=rollout))) == serves
    assert not serves_judge(replace(config, custom_reward_function=CustomRewardFunctionConfig()))


def test_without_a_reward_model_the_missing_keys_are_named(section):
    with pytest.raises(RewardError, match="asks for reward_router_address, of a reward model that is served"):
        build_reward_manager(section(enable=False, debug=True), max_response_length=8).start()


def test_other_functions_get_the_output_of_the_model(tmp_path):
    file = tmp_path / "plain.py"
    file.write_text("def compute_score(data_source, solution_str, ground_truth, **kwargs):\n    return 1.0\n")
    assert service_arguments(str(file), "compute_score") == set()
    assert service_arguments(str(tmp_path / "missing.py"), "compute_score") == set()
