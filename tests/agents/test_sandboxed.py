"""Hostile tools in the sandbox: each failure is an answer, and the next call works."""

import asyncio
import json
import types

import pytest

from tests.agents.conftest import TOOLS
from tests.agents.test_tools import TASK
from verl.agents.episode import Episode
from verl.agents.sandboxed import SandboxedFunctions
from verl.agents.tool_calls import ToolCalls, ToolSettings
from verl.config import RewardConfig
from verl.registry import reference_to
from verl.tools.schemas import FunctionCall
from verl.tools.tool_registry import load_all_tools


@pytest.fixture(scope="module")
def calls():
    pool = SandboxedFunctions(RewardConfig(num_workers=1), timeout_s=1.0)
    yield ToolCalls(load_all_tools(None, str(TOOLS)), ToolSettings(timeout_s=30.0, max_length=200), pool=pool)
    pool.close()


def test_a_call_that_waits_for_a_process_has_its_time():
    """The call waits behind a call that hangs, in a pool of one process; the pool's time limit holds for both."""
    pool = SandboxedFunctions(RewardConfig(num_workers=1), timeout_s=1.0)
    calls = ToolCalls(load_all_tools(None, str(TOOLS)), ToolSettings(timeout_s=1.0), pool=pool)

    async def both():
        requests = [FunctionCall("break_things", '{"how": "hang"}'), FunctionCall("echo", '{"text": "a"}')]
        return await asyncio.gather(*(calls.call(Episode(TASK, None), call) for call in requests))

    try:
        hung, echoed = asyncio.run(both())
    finally:
        pool.close()
    assert "took longer than 1 s" in hung.text
    assert echoed.text == "heard a"


def plain(n: int) -> str:
    """Count.

    Args:
        n: a number
    """
    return str(n + 1)


@pytest.mark.parametrize("is_global", [True, False])
def test_a_function_that_python_code_passes_is_a_tool(is_global):
    """Without a mark. A function without a file runs in the process of the run."""
    function = plain if is_global else types.FunctionType(plain.__code__, globals(), "other")
    function.__doc__, function.__annotations__ = plain.__doc__, plain.__annotations__
    (tool,) = load_all_tools(None, reference_to(function))
    assert (tool.path is None) == (not is_global)
    pool = SandboxedFunctions(RewardConfig(num_workers=1), timeout_s=10.0)
    calls = ToolCalls([tool], ToolSettings(timeout_s=30.0), pool=pool)
    try:
        call = calls.call(Episode(TASK, None), FunctionCall(tool.name, '{"n": 2}'))
        assert asyncio.run(call).text == "3"
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("hang", "took longer than 1 s"),
        ("exit", "ended its process with exit code 3"),
        ("raise", "it is broken"),
        ("long", "...(truncated)..."),
        ("object", '{"a": "<object'),
        ("control", "I won"),
    ],
)
def test_a_tool_that_fails_is_answered(calls, how, text):
    def call(name, **arguments):
        return asyncio.run(calls.call(Episode(TASK, None), FunctionCall(name, json.dumps(arguments))))

    answer = call("break_things", how=how)
    assert text in answer.text
    assert len(answer.text) < 450
    assert "tool/" not in answer.text  # names of ours mean nothing to the model
    assert call("echo", text="still here").text == "heard still here"
