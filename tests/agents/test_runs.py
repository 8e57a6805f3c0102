"""Training on episodes: GRPO runs with samples that call tools."""

import json

import numpy as np
import pytest

from tests.letters_task import write_reward
from verl.config import load_config
from verl.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout"
ENDS = f"{ROLLOUT}.stop_token_ids={list(range(80))}"  # turns of a few tokens

LOOPS = """
- name: my_loop
  _target_: tests.agents.loops_of_users.EchoTwice
  suffix: "!"
"""
TOOL_CLASSES = """
tools:
  - class_name: verl.tools.gsm8k_tool.Gsm8kTool
    config: {type: native}
    tool_schema: {type: function, function: {name: calc_gsm8k_reward, description: Score an answer., parameters: {
      type: object, properties: {answer: {type: string, description: the answer}}, required: [answer]}}}
"""


def episodes(run, kind="episode"):
    files = sorted((run.folder / "episodes").glob("*.jsonl"))
    return [r for file in files for r in map(json.loads, file.read_text().splitlines()) if r["kind"] == kind]


def test_what_trains_is_what_was_sampled_and_is_shown(agent_run, capsys):
    from verl.cli.show import run_show

    run = agent_run(ENDS)
    for row in run.training_rows():
        assert row["training/rollout_probs_diff_max"] < 1e-5
        assert row["rollout/num_episodes"] == 12
        assert row["rollout/num_failed_episodes"] == 0
        assert row["num_turns/max"] > 4
        assert row["rollout/num_tool_calls"] == 12 * row["tool_call_counts/mean"]
        times = {kind: row[f"timing_s/agent_loop/generate_sequences/{kind}"] for kind in ("min", "mean", "max")}
        assert 0 < times["min"] <= times["mean"] <= times["max"]
        assert 0 < row["timing_s/agent_loop/slowest/tool_calls"] <= row["timing_s/agent_loop/tool_calls/max"]
    transcripts = episodes(run)
    assert len(transcripts) == 24
    roles = [message["role"] for message in max(transcripts, key=lambda t: len(t["messages"]))["messages"]]
    assert roles[:4] == ["user", "assistant", "tool", "assistant"] or roles[2:4] == ["tool", "tool"]
    results = episodes(run, "tool")
    assert any(r["result"]["text"].startswith("heard") for r in results)
    assert any(r["result"]["error"] for r in results)  # malformed ones and unknown names were answered
    capsys.readouterr()
    assert run_show([str(run.folder), "--episodes", "2"]) == 0
    printed = capsys.readouterr().out
    assert "episodes of the last steps: 24" in printed
    assert "turns each" in printed
    assert "tool calls: echo" in printed
    assert "[user] train" in printed
    assert "calls echo(" in printed or "[assistant]" in printed


def test_a_loop_of_the_users(agent_run, agent_task, tmp_path):
    (tmp_path / "loops.yaml").write_text(LOOPS)
    run = agent_run(
        ENDS,
        f"{ROLLOUT}.agent.agent_loop_config_path={tmp_path}/loops.yaml",
        f"{ROLLOUT}.agent.default_agent_loop=my_loop",
        f"data.val_files={agent_task}/val.jsonl",
        "trainer.val_before_train=True",
    )
    assert [run.rows[0][f"val-aux/num_turns/{kind}"] for kind in ("min", "max", "mean")] == [4, 4, 4]
    for row in run.training_rows():
        assert row["num_turns/mean"] == 4
        assert row["critic/score/mean"] == pytest.approx(np.mean([0.5, 0.25, 0.125]))  # rewards of the loop, by sample
        assert row["training/rollout_probs_diff_max"] < 1e-5


def test_rows_choose_agents_and_tools(agent_run, changed_rows, tmp_path):
    """agent_name, tools_kwargs and tool_selection of a row, with the GSM8K tool of a YAML file in addition to functions."""

    def choose(number, row):
        truth = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": str(number % 4)}}}
        chosen = ["echo"] if number % 4 == 3 else ["calc_gsm8k_reward"]
        row["agent_name"] = ("tool_agent", "tool_agent", "single_turn_agent", "tool_agent")[number % 4]
        row["extra_info"] = {"need_tools_kwargs": True, "tools_kwargs": truth, "tool_selection": chosen}

    rows = changed_rows(choose)
    (tmp_path / "tools.yaml").write_text(TOOL_CLASSES)
    rewards = "extra_info['rollout_reward_scores'].get('tool_rewards', [0.0])"
    run = agent_run(
        ENDS, f"data.train_files={rows}", "data.shuffle=False", f"{ROLLOUT}.multi_turn.format=answers",
        f"{ROLLOUT}.multi_turn.tool_config_path={tmp_path}/tools.yaml", f"{ROLLOUT}.multi_turn.max_assistant_turns=3",
        write_reward(tmp_path, f"return sum({rewards}) + extra_info['num_turns']"), "trainer.total_training_steps=1",
    )  # fmt: skip
    told = {}
    for record in episodes(run, "tool"):
        told.setdefault(record["episode"].split("/")[1], []).append(record["result"])
    assert set(told) == {"0", "1", "3"}  # the third prompt is of one turn
    assert {(r["text"], r["reward"]) for r in told["0"]} == {("Current parsed answer='1' reward=0.0", -0.05)}
    assert [r["reward"] for r in told["1"] if r["reward"] == 0.0] == [
        0.0
    ] * 3  # the first call of each episode is right
    assert {r["error"] for r in told["3"]} == {"Unknown function 'calc_gsm8k_reward'. Available tools: [echo]"}
    scores = {e["episode"]: e["extra"] for e in episodes(run)}
    assert scores["train/0/0"]["rollout_reward_scores"] == {"tool_rewards": [-0.05, -0.05]}
    (row,) = run.training_rows()
    assert (row["num_turns/min"], row["num_turns/max"]) == (2, 6)


def test_tools_in_the_sandbox(agent_run):
    run = agent_run(ENDS, f"{ROLLOUT}.multi_turn.tool_sandbox=True", "trainer.total_training_steps=1")
    results = episodes(run, "tool")
    assert any(r["result"]["text"].startswith("heard") for r in results)


def test_hostile_tools_end_no_run(agent_run):
    run = agent_run(
        ENDS, f"{ROLLOUT}.multi_turn.tool_sandbox=True", f"{ROLLOUT}.multi_turn.tool_timeout_s=1",
        f"{ROLLOUT}.multi_turn.format=hostile", f"{ROLLOUT}.multi_turn.max_assistant_turns=2",
        "trainer.total_training_steps=1",
    )  # fmt: skip
    (row,) = run.training_rows()
    assert row["rollout/num_failed_episodes"] == 0
    assert row["training/rollout_probs_diff_max"] < 1e-5
    said = "".join(str(r["result"]["error"]) for r in episodes(run, "tool"))
    for words in (
        "took longer than 1 s", "exit code 3", "it is broken", "Invalid JSON", "'how' is missing", "Unknown function 'nothing'"
    ):  # fmt: skip
        assert words in said


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ([f"{ROLLOUT}.agent.default_agent_loop=single_turn_agent"], "every sample would be a single turn"),
        ([f"{ROLLOUT}.multi_turn.function_tool_path=null"], "neither tools nor interactions"),
        (
            [
                f"{ROLLOUT}.agent.default_agent_loop=tool_agnet",
                "actor_rollout_ref.model.external_lib=null",
                f"{ROLLOUT}.multi_turn.format=hermes",
            ],
            "there is no agent loop 'tool_agnet'; did you mean 'tool_agent'",
        ),  # fmt: skip
        ([f"{ROLLOUT}.multi_turn.enable=False"], "existing releases put the tools into every prompt"),
        (
            [f"{ROLLOUT}.prefetch_num=1", f"{ROLLOUT}.partial_rollout=True", f"{ROLLOUT}.agent.runner=a.py:run"],
            "may not repeat",
        ),
        ([f"{ROLLOUT}.multi_turn.tool_response_truncate_side=top"], "left, middle"),
        ([f"{ROLLOUT}.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2"], "a whole model on each device"),
        (
            [f"{ROLLOUT}.agent.runner=a.py:run", f"{ROLLOUT}.agent.gateway_port=65535", "trainer.n_gpus_per_node=2"],
            "the last rank would have 65536. Choose at most 65534",
        ),
    ],
)
def test_contradictions_are_refused(agent_overrides, tmp_path, changes, sentence):
    from tests.run.conftest import merge

    with pytest.raises(ConfigError, match=sentence):
        load_config(merge([*agent_overrides, f"trainer.default_local_dir={tmp_path}/run"], tuple(changes)))
