"""Hostile tools in the sandbox: each failure is an answer, and the next call works."""

import asyncio
import json

import pytest

from tests.agents.conftest import TOOLS
from tests.agents.test_tools import TASK
from verl.agents.episode import Episode
from verl.agents.sandboxed import SandboxedFunctions
from verl.agents.tool_calls import ToolCalls, ToolSettings
from verl.config import RewardConfig
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
