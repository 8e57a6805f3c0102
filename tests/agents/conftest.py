"""A tiny run on episodes with tools."""

from pathlib import Path

import pytest

from tests.json_lines import read_lines, write_lines
from tests.letters_task import overrides, write_task

HERE = Path(__file__).parent
TOOLS = HERE / "echo_tools.py"
ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture(scope="session")
def agent_task(tmp_path_factory):
    """Folder with train.jsonl (24 rows), val.jsonl and reward.py."""
    return write_task(tmp_path_factory.mktemp("agent_task"))


@pytest.fixture
def agent_overrides(tiny_llama, agent_task):
    """Overrides of a GRPO run of 4 prompts x 3 episodes a step in float32."""
    return overrides(
        tiny_llama,
        agent_task,
        "actor_rollout_ref.model.external_lib=tests.agents.echo_tools",
        "data.val_files=[]",
        "data.max_response_length=160",
        f"{ROLLOUT}.n=3",
        f"{ROLLOUT}.multi_turn.enable=True",
        f"{ROLLOUT}.multi_turn.function_tool_path={TOOLS}",
        f"{ROLLOUT}.multi_turn.format=every_turn",
        f"{ROLLOUT}.multi_turn.max_parallel_calls=2",
        f"{ROLLOUT}.multi_turn.tool_sandbox=False",
    )


@pytest.fixture
def agent_run(agent_overrides, tmp_path):
    """agent_run("key=value", ...) -> the Run."""
    from tests.run.conftest import train_run

    return lambda *changes, folder="run": train_run(tmp_path / folder, agent_overrides, changes)


@pytest.fixture
def changed_rows(agent_task, tmp_path):
    """`changed_rows(change)` -> the file of the task's rows, each after `change(number, row)`."""

    def write(change):
        rows = read_lines(agent_task / "train.jsonl")
        for number, row in enumerate(rows):
            change(number, row)
        file = tmp_path / "rows.jsonl"
        write_lines(file, rows)
        return file

    return write
