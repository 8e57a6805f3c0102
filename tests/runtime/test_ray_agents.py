"""Episodes of agents on two ranks of Ray: the conversations of one process."""

import json

import pytest

from tests.agents.conftest import TOOLS
from tests.agents.test_ways import HERE
from tests.runtime.conftest import assert_same, assert_same_weights, train_here

ray = pytest.importorskip("ray")

from tests.runtime.test_ray import TWO, cluster, driven  # noqa: E402, F401 - needs ray

pytestmark = pytest.mark.slow
ROLLOUT = "actor_rollout_ref.rollout"
AGENTS = [
    "data.max_response_length=96",
    f"{ROLLOUT}.stop_token_ids={list(range(80))}",  # turns of a few tokens
    f"{ROLLOUT}.multi_turn.format=every_turn",
    f"{ROLLOUT}.multi_turn.tool_sandbox=False",
]
WAYS = {
    "tools": [f"{ROLLOUT}.multi_turn.enable=True", f"{ROLLOUT}.multi_turn.function_tool_path={TOOLS}"],
    "environment": [f"{ROLLOUT}.agent.environment={HERE}:Echo"],
    "endpoint": [f"{ROLLOUT}.agent.runner={HERE}:run"],
}


def conversations(run):
    """Episode -> its messages, and the ranks that held any."""
    by_episode, ranks = {}, set()
    for file in sorted((run.folder / "episodes").glob("step_*.jsonl")):
        ranks.add(file.name.split(".")[1])
        for line in file.read_text().splitlines():
            record = json.loads(line)
            if record["kind"] == "episode":
                by_episode[record["episode"]] = (record["messages"], record["reward"], record["error"])
    return by_episode, ranks


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_have_the_conversations_of_one_process(driven, jobs, way):  # noqa: F811
    if way == "endpoint":
        pytest.importorskip("openai", reason="the plain client is not installed")
        pytest.importorskip("uvicorn", reason="needs the extra agents")
    here = train_here(jobs, f"{way}_here", *AGENTS, *WAYS[way])
    ranks = train_here(jobs, f"{way}_ray", *AGENTS, *WAYS[way], *TWO)
    (one_process, alone), (two_ranks, both) = conversations(here), conversations(ranks)
    assert (alone, both) == ({"rank0"}, {"rank0", "rank1"})
    assert two_ranks == one_process
    assert max(len(messages) for messages, *_ in one_process.values()) > 4
    assert_same(ranks, here, rel=1e-10)
    assert_same_weights(ranks, here, 3, rel=1e-10)
