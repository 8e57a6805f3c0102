"""Names of the existing verl's agents that no other test imports."""

import asyncio

import pytest

from verl.compat.python import load_class_from_fqn as get_class
from verl.errors import ConfigError
from verl.experimental.agent_loop import AgentLoopManager, AgentLoopWorker, utils
from verl.experimental.agent_loop.agent_loop import get_trajectory_info
from verl.interactions.gsm8k_interaction import Gsm8kInteraction
from verl.tools.geo3k_tool import Geo3kTool
from verl.tools.gsm8k_tool import Gsm8kTool
from verl.tools.sandbox_fusion_tools import SandboxFusionTool
from verl.tools.schemas import (
    OpenAIFunctionCallSchema,
    OpenAIFunctionParsedSchema,
    OpenAIFunctionToolCall,
    ToolResponse,
)


@pytest.mark.parametrize("base", [AgentLoopManager, AgentLoopWorker])
def test_managers_of_users_are_refused_with_the_way_that_there_is(base):
    class Mine(base):
        pass

    with pytest.raises(ConfigError, match=r"Mine is not used in this version.*agent_loop_config_path"):
        Mine(None, worker_group=None)


def test_trajectories_are_numbered_within_their_prompt():
    rows = asyncio.run(get_trajectory_info(3, [7, 7, 8], validate=False))
    assert [(row["sample_index"], row["rollout_n"]) for row in rows] == [(7, 0), (7, 1), (8, 0)]
    assert {(row["step"], row["validate"]) for row in rows} == {(3, False)}


def test_calls_of_openai_are_read():
    def read(arguments):
        return OpenAIFunctionCallSchema.from_openai_function_parsed_schema(OpenAIFunctionParsedSchema("f", arguments))

    assert read('{"a": 1}') == (OpenAIFunctionCallSchema("f", {"a": 1}), False)
    assert read("{oops") == read("[1]") == (OpenAIFunctionCallSchema("f", {}), True)
    call = OpenAIFunctionToolCall.model_validate({"id": "x", "function": {"name": "f", "arguments": {"a": 1}}})
    assert call.function.arguments == {"a": 1}
    assert call.model_dump()["type"] == "function"


def test_classes_by_name():
    assert get_class("verl.tools.gsm8k_tool.Gsm8kTool") is Gsm8kTool
    assert get_class("verl.interactions.gsm8k_interaction.Gsm8kInteraction") is Gsm8kInteraction


def test_programs_run_here_in_place_of_a_service():
    class Mine(SandboxFusionTool):
        async def execute(self, instance_id, parameters, **kwargs):
            code, timeout = parameters["code"], self.default_timeout
            text = await self.execution_pool.execute.remote(
                self.execute_code, instance_id, code, timeout, self.default_language
            )
            return ToolResponse(text=text), None, None

    config = {"sandbox_fusion_url": "https://x/run_code", "num_workers": 2, "default_timeout": 5}
    for tool in (SandboxFusionTool(config), Mine(config)):
        answer, *_ = asyncio.run(tool.execute("1", {"code": "print(6 * 7)"}))
        assert answer.text.strip() == "42"
    assert "ZeroDivisionError" in tool.execute_code("1", "1 / 0")
    with pytest.raises(ValueError, match="programs are Python here"):
        tool.execute_code("1", "", language="bash")


def test_answers_of_geometry_are_scored_as_calls():
    tool = Geo3kTool({})
    assert tool.name == "calc_geo3k_reward"
    instance, _ = asyncio.run(tool.create(create_kwargs={"ground_truth": "\\frac{1}{2}"}))
    assert [asyncio.run(tool.execute(instance, {"answer": answer}))[1] for answer in ("3", "0.5")] == [-0.05, 0.0]
    assert asyncio.run(tool.calc_reward(instance)) == 1.0


def test_texts_of_gpt_oss_and_paths(tmp_path):
    answer = utils.format_gpt_oss_tool_response_manually("4", "add")
    assert utils.add_generation_prompt_for_gpt_oss(answer) == (
        "<|start|>functions.add to=assistant<|channel|>commentary<|message|>4<|end|><|start|>assistant"
    )
    (tmp_path / "agents.yaml").write_text("")
    assert utils.resolve_config_path(f"{tmp_path}/agents.yaml") == f"{tmp_path}/agents.yaml"
    with pytest.raises(FileNotFoundError, match="no_agents.yaml"):
        utils.resolve_config_path("no_agents.yaml")
