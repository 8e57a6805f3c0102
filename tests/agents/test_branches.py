"""Every conversation of an episode trains: agent.branches=all."""

import json

import numpy as np
import pytest
import torch

from tests.agents.test_gateway import ASK, ROLLOUT, chat, play  # noqa: F401  (a fixture)
from verl.agents.branches import episodes, spread_over_conversations, with_conversations
from verl.agents.journal import records, transcripts
from verl.agents.recorded import _unpacked, packed_branch
from verl.data_proto.merge import object_array
from verl.data_proto.proto import DataProto
from verl.data_proto.trajectory import Segment, Trajectory, to_columns
from verl.errors import ConfigError, RewardError
from verl.roles.updates import MiniBatchSchedule

pytest.importorskip("starlette", reason="needs the extra agents")
pytest.importorskip("uvicorn", reason="needs the extra agents")

ALL = f"{ROLLOUT}.agent.branches=all"
HELPER = [{"role": "system", "content": "You are a helper."}, {"role": "user", "content": "Help."}]


def with_helper(client, task):
    """Two turns of a main conversation, and a helper of one."""
    said = [*ASK, chat(client, ASK)["choices"][0]["message"], {"role": "user", "content": "more"}]
    chat(client, HELPER, max_tokens=2)
    chat(client, said)
    return 1.0


@pytest.mark.parametrize("changes", [(), (ALL, "algorithm.adv_estimator=grpo")])
def test_each_sampled_token_trains_once(play, changes):  # noqa: F811
    (result,), engine = play(with_helper, 1, *changes)
    assert result.error is None
    assert result.num_turns == 4, "of the conversation that trains"
    assert [message["content"] for message in result.trajectory.messages][::2] == ["Go.", "more"]
    sampled = {number: [ids for _, ids, _ in turns] for (_, number), turns in engine.sampled.items()}
    assert result.num_sampled == sum(len(ids) for turns in sampled.values() for ids in turns)
    trained = [
        segment.token_ids.tolist()
        for one in result.branches
        for segment in one.segments
        if segment.log_probs is not None
    ]
    assert trained == ([ids for number, turns in sampled.items() if number for ids in turns] if changes else [])
    assert [messages[0]["content"] for messages in result.conversations] == ["You are a helper."]
    for one in result.branches:
        saved = json.loads(json.dumps(packed_branch(one)))
        assert packed_branch(
            _unpacked(saved, result.trajectory, np.dtype(np.float64), lambda digest: None)
        ) == packed_branch(one)


def trajectory(ordinal, sample, prompt, *parts):
    segments = [
        Segment(np.array(ids, np.int32), None if log_prob is None else np.full(len(ids), log_prob), 3,
                "policy" if log_prob is not None else "environment")
        for ids, log_prob in parts
    ]  # fmt: skip
    return Trajectory(ordinal, sample, prompt, segments, "stop")


def batch():
    """Three episodes of one prompt; the first has two further conversations, the last one."""
    main = [trajectory(0, n, (1, 2), ([5 + n, 6], -0.5)) for n in range(3)]
    further = [
        [trajectory(0, 0, (3,), ([7], -1.0)), trajectory(0, 0, (3, 4), ([8, 9], None), ([10], -2.0))],
        [], [trajectory(0, 2, (4,), ([11, 12], -3.0))],
    ]  # fmt: skip
    columns = to_columns(main, pad_token_id=0, prompt_width=4, response_width=6)
    scores = torch.zeros(3, 6)
    scores[:, 1] = torch.tensor([1.0, 0.0, 0.5])
    columns |= {
        "token_level_scores": scores,
        "is_scored": torch.tensor([True, True, True]),
        "ordinal": torch.zeros(3).long(),
    }
    return DataProto.from_dict(columns, {"episode_branches": object_array(further), "uid": object_array(["0"] * 3)})


def test_further_conversations_are_rows_with_the_advantage_of_their_episode():
    rows = with_conversations(batch(), 0)
    assert rows.batch["branch_of"].tolist() == [-1, -1, -1, 0, 0, 2]
    assert rows.batch["response_mask"].sum(dim=1).tolist() == [2, 2, 2, 1, 1, 2]
    assert rows.batch["token_level_scores"].sum(dim=1).tolist() == [1.0, 0.0, 0.5, 0.0, 0.0, 0.0]
    assert rows.batch["rollout_log_probs"][4].tolist() == [0.0, 0.0, -2.0, 0.0, 0.0, 0.0]
    assert rows.batch["prompts"][3].tolist() == [0, 0, 0, 3]
    main_rows = episodes(rows)
    assert len(main_rows) == 3
    advantages = torch.tensor([[1.0], [-1.0], [0.25]]) * main_rows.batch["response_mask"]
    values = spread_over_conversations(rows, advantages)
    assert values.tolist() == [
        [1.0, 1.0, 0, 0, 0, 0], [-1.0, -1.0, 0, 0, 0, 0], [0.25, 0.25, 0, 0, 0, 0],
        [1.0, 0, 0, 0, 0, 0], [0, 0, 1.0, 0, 0, 0], [0.25, 0.25, 0, 0, 0, 0],
    ]  # fmt: skip
    advantages[0, 1] = 2.0
    with pytest.raises(ConfigError, match="Choose grpo or another estimator of groups"):
        spread_over_conversations(rows, advantages)
    assert with_conversations(batch().select_idxs(np.array([1])), 0).batch["branch_of"].tolist() == [-1]


def test_a_mini_batch_has_the_further_conversations_of_its_episodes():
    rows = with_conversations(batch(), 0)
    minis = MiniBatchSchedule(size=2, epochs=2, shuffle=True, seed=1).rows(rows, 1)
    assert len(minis) == 4, "as many optimizer steps as without them"
    owners = rows.batch["branch_of"].tolist()
    for mini in minis:
        assert sorted(row for row in mini if row > 2) == [r for r in range(3, 6) if owners[r] in mini]
    for one in (minis[:2], minis[2:]):
        assert sorted(np.concatenate(one).tolist()) == list(range(6))


RUNNER = """
import httpx

def ask(client, content, limit):
    body = {"model": "policy", "messages": [{"role": "user", "content": content}], "max_tokens": limit}
    return client.post("/chat/completions", json=body).json()["choices"][0]["message"]["content"] or ""

def run(task, base_url, api_key):
    with httpx.Client(base_url=base_url, headers={"Authorization": f"Bearer {api_key}"}, timeout=120) as client:
        helped = ask(client, "help", 3)
        return float(len(ask(client, task["prompt"][-1]["content"] + helped, 6)) % 2)
"""


@pytest.mark.parametrize("changes", [(), (f"{ROLLOUT}.prefetch_num=1",)])
def test_a_run_trains_all_conversations_and_resumes_to_the_same_steps(agent_run, tmp_path, ends_after, changes):
    (tmp_path / "agent.py").write_text(RUNNER)
    plain = ("trainer.total_training_steps=3", "trainer.save_freq=1", *changes)
    settings = (f"{ROLLOUT}.multi_turn.enable=False", f"{ROLLOUT}.multi_turn.function_tool_path=null",
                f"{ROLLOUT}.agent.runner={tmp_path}/agent.py:run", ALL)  # fmt: skip
    unbroken = agent_run(*settings, *plain)
    for row in unbroken.training_rows():
        assert row["training/rollout_probs_diff_max"] < (0.1 if changes else 1e-5)  # samples of the last version
        assert row.get("rollout/trained_token_share", 1.0) == 1.0  # a step ahead generates none
        assert row["actor/grad_norm"] > 0
    transcript = "\n".join(transcripts(records(unbroken.folder), 1))
    assert "[user] help" in transcript
    assert "── its conversation 2\n" in transcript
    ends_after(2)
    agent_run(*settings, *plain, folder="cut")
    resumed = agent_run(*settings, *plain, folder="cut")
    norms = [[row["actor/grad_norm"] for row in run.training_rows()] for run in (unbroken, resumed)]
    assert norms[0] == norms[1]


LOOPS = """
- {name: two, _target_: tests.agents.loops_of_users.TwoConversations}
"""


@pytest.mark.parametrize("changes", [(), (ALL,)])
def test_a_loop_that_returns_several_sequences_chooses_what_trains(agent_run, tmp_path, changes):
    (tmp_path / "loops.yaml").write_text(LOOPS)
    settings = (
        f"{ROLLOUT}.agent.agent_loop_config_path={tmp_path}/loops.yaml", f"{ROLLOUT}.agent.default_agent_loop=two",
        "trainer.total_training_steps=1",
    )  # fmt: skip
    if not changes:
        with pytest.raises(RewardError, match="its loop returned 2 sequences, and one trains"):
            agent_run(*settings)
        return
    (row,) = agent_run(*settings, *changes).training_rows()
    assert row["rollout/num_failed_episodes"] == 0
    assert 0.5 < row["rollout/trained_token_share"] < 1.0, "the third conversation is left out"
