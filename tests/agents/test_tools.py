"""Tools: their schemas and files, and an answer for each failure of a call."""

import asyncio
import json

import numpy as np
import pytest

from tests.agents.echo_tools import break_things, echo
from verl.agents.episode import Episode, EpisodeTask
from verl.agents.journal import Journal
from verl.agents.tool_calls import ToolCalls, ToolSettings, truncated
from verl.data.prompts import truncate
from verl.errors import ConfigError
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import FUNCTION_TOOL_REGISTRY, MARK, function_tool
from verl.tools.schemas import FunctionCall, OpenAIFunctionToolSchema, ToolResponse
from verl.tools.tool_registry import load_all_tools

SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
TASK = EpisodeTask(3, 1, 2, "train", (1, 2), {}, 50, 20)
YAML = """
tools:
  - class_name: tests.agents.test_tools.Counter
    config: {type: native, start: 5}
    tool_schema:
      type: function
      function:
        name: count
        description: Count up.
        parameters: {type: object, properties: {by: {type: integer, description: how far}}, required: [by]}
"""


class Counter(BaseTool):
    async def create(self, instance_id=None, **kwargs):
        self.value = kwargs["create_kwargs"].get("value", self.config["start"])
        return "one", ToolResponse()

    def execute(self, instance_id, parameters, **kwargs):
        self.value += parameters["by"]
        return ToolResponse(text=str(self.value)), np.float32(0.5), {"by": parameters["by"]}

    async def release(self, instance_id, **kwargs):
        self.released = instance_id


def call(tools, name, arguments, *, settings=None, **more):
    calls = ToolCalls(tools, settings or ToolSettings(timeout_s=5.0, max_length=100))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return asyncio.run(calls.call(Episode(TASK, None), FunctionCall(name, text), **more))


@pytest.fixture
def tools():
    return [getattr(f, MARK) for f in (echo, break_things)]


@pytest.fixture
def counter(tmp_path):
    (tmp_path / "tools.yaml").write_text(YAML)
    return load_all_tools(str(tmp_path / "tools.yaml"))


def test_a_function_and_its_schema(tools):
    schema = tools[0].tool_schema.for_template()["function"]
    assert schema["name"] == "echo"
    assert schema["parameters"]["properties"]["text"] == {"type": "string", "description": "the text"}
    assert call(tools, "echo", {"text": "a"}).text == "heard a"


def test_a_class_of_a_yaml_file(counter):
    answer = call(counter, "count", {"by": 2})
    assert (answer.text, answer.reward, answer.metrics, answer.error) == ("7", 0.5, {"by": 2}, None)
    assert call(counter, "count", {"by": 2}, kwargs={"create_kwargs": {"value": 1}}).text == "3"
    assert counter[0].released == "one"


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("ech", {}, "Unknown function 'ech'. Available tools: [echo, break_things]"),
        ("echo", "{'text'", "Invalid JSON in arguments for 'echo'"),
        ("echo", "[1]", "Invalid JSON in arguments for 'echo': they are a list, not an object"),
        ("echo", "[" * 100_000, "Invalid JSON in arguments for 'echo'"),
        ("echo", {}, "the argument 'text' is missing"),
        ("echo", {"text": "a", "loud": 1}, "got an unexpected keyword argument 'loud'"),
        ("break_things", {"how": "raise"}, "Error executing tool 'break_things': it is broken"),
        ("break_things", {"how": "metrics"}, "Error executing tool 'break_things': keys must be str"),
        ("x" * 5000, {}, "Unknown function"),
    ],
)
def test_a_wrong_call_is_answered(tools, name, arguments, text):
    answer = call(tools, name, arguments)
    assert text in answer.error
    assert len(answer.text) <= 130


def test_a_call_that_hangs_is_answered(tools):
    answer = call(tools, "break_things", {"how": "hang"}, settings=ToolSettings(timeout_s=0.2))
    assert "took longer than 0.2 s" in answer.text


def test_a_long_answer_is_cut_with_a_warning(tools, caplog):
    assert len(call(tools, "break_things", {"how": "long"}).text) == 100 + len("...(truncated)...")
    assert truncated("abcdef", 4, "left") == "(truncated)...cdef"
    assert truncated("abcdef", 4, "right") == "abcd...(truncated)"
    assert truncated("abcdef", 4, "middle") == "ab...(truncated)...ef"
    assert truncated("abcd", 4, "middle", "a tool") == "abcd"
    assert caplog.text.count("The tool break_things answered with more than 100 characters") == 1


@pytest.mark.parametrize("side", ["left", "middle", "right"])
def test_tool_responses_are_cut_on_the_side_that_prompts_are_cut_on(side):
    tokens = list(range(10))
    remaining = truncate(tokens, 4, side)
    text = truncated("".join(map(str, tokens)), 4, side).replace("(truncated)", "").replace("...", "")
    assert text == "".join(map(str, remaining))


def test_a_row_may_narrow_the_tools(tools):
    assert "Available tools: [break_things]" in call(tools, "echo", {"text": "a"}, names=["break_things"]).text


def test_results_are_replayed_for_the_same_call_after_the_same_tokens(tools, tmp_path):
    def run(text, tokens):
        journal = Journal(tmp_path)
        journal.begin(2)
        episode = Episode(TASK, None)
        episode._begin([*tokens], None, [])
        answer = asyncio.run(ToolCalls(tools, ToolSettings(), journal).call(episode, FunctionCall("echo", text)))
        journal.close()
        return answer

    first = run('{"text": "a"}', [1])
    assert not first.replayed
    assert run('{"text": "a"}', [1]).replayed
    assert run('{"text": "a"}', [1]).text == first.text
    assert not run('{"text": "b"}', [1]).replayed


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("tools: 3", "a list of objects under 'tools'"),
        ("tools: [{class_name: Counter}]", "names no class"),
        ("tools: [{class_name: no_such_module.Counter}]", "Set PYTHONPATH to the folder"),
        ("tools: [{class_name: tests.agents.test_tools.Countr}]", "did you mean 'Counter'"),
        ("tools: [{class_name: tests.agents.test_tools.Counter}]", "has no schema"),
        ("tools: [{class_name: x.y, config: {type: mpc}}]", "neither native nor mcp"),
        ("tools: [{config: {type: mcp}}]", "no mcp.mcp_servers_config_path"),
        ("tools: [", "cannot be read"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, text, sentence):
    (tmp_path / "tools.yaml").write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        load_all_tools(str(tmp_path / "tools.yaml"))


def test_functions_that_no_schema_can_describe_are_refused():
    with pytest.raises(ConfigError, match=r"variadic parameter \*args"):
        function_tool(lambda *args: "")

    def untyped(a):
        """No types."""

    def undescribed(a: int):
        """No line for a."""

    def unknown(a: "Nothing"):  # noqa: F821
        """A type that does not exist.

        Args:
            a: an argument
        """

    for function, sentence in (
        (untyped, "missing a type hint for a"),
        (undescribed, "no description for the argument a"),
    ):
        with pytest.raises(ValueError, match=sentence):
            function_tool(function)
    with pytest.raises(ConfigError, match="no usable signature"):
        getattr(function_tool(unknown), MARK).tool_schema  # noqa: B018
    tool = getattr(function_tool("g", schema=SCHEMA)(lambda: "x"), MARK)
    assert tool.name == "g"
    assert OpenAIFunctionToolSchema.model_validate(SCHEMA).model_dump()["function"]["name"] == "f"


def test_one_name_for_two_tools_is_refused(tmp_path):
    (tmp_path / "tools.yaml").write_text(YAML.replace("name: count", "name: echo"))
    with pytest.raises(ValueError, match=r"Names of tools \['echo'\] collide"):
        load_all_tools(str(tmp_path / "tools.yaml"), "tests/agents/echo_tools.py")
    one = function_tool("twice", schema=SCHEMA)(lambda: "x")
    with pytest.raises(ValueError, match="'twice' is already registered"):

        @function_tool("twice", schema=SCHEMA)
        def other():
            return "y"

    assert FUNCTION_TOOL_REGISTRY["twice"] is getattr(one, MARK)
