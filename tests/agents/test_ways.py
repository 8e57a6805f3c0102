"""One agent written three ways trains on the same tokens; environments and endpoints bring rewards; kills lose nothing."""

import shutil
from collections import Counter

import pytest

from tests.agents.conftest import TOOLS
from tests.agents.test_runs import ENDS, ROLLOUT, episodes
from verl.errors import RewardError
from verl.tracking.ledger.reader import Ledger

HERE = "tests/agents/agents_of_users.py"
NO_TOOLS = f"{ROLLOUT}.multi_turn.function_tool_path=null"
ONE_STEP = "trainer.total_training_steps=1"


def digest(run):
    """Of tokens, masks as far as they have log-probs, log-probs and rewards of all that trained."""
    with Ledger.open(run.folder) as ledger:
        return ledger.offset().digest


def test_three_ways_are_one(agent_run):
    """Tool loop, environment and a plain OpenAI client: the same tokens, log-probs and rewards, bit for bit."""
    loop = agent_run(ENDS, ONE_STEP)
    environment = agent_run(
        ENDS, ONE_STEP, NO_TOOLS, f"{ROLLOUT}.multi_turn.enable=False", f"{ROLLOUT}.agent.environment={HERE}:Echo",
        folder="environment",
    )  # fmt: skip
    assert digest(environment) == digest(loop)
    pytest.importorskip("openai", reason="the plain client is not installed")
    pytest.importorskip("uvicorn", reason="needs the extra agents")
    endpoint = agent_run(
        ENDS, ONE_STEP, NO_TOOLS, f"{ROLLOUT}.multi_turn.enable=False", f"{ROLLOUT}.agent.runner={HERE}:run",
        folder="endpoint",
    )  # fmt: skip
    assert digest(endpoint) == digest(loop)
    rows = [run.training_rows()[0] for run in (loop, environment, endpoint)]
    assert len({row["actor/grad_norm"] for row in rows}) == 1
    assert rows[0]["rollout/num_tool_calls"] == rows[1]["rollout/num_tool_calls"] > 0


def test_a_game_that_breaks_is_left_out(agent_run, changed_rows, caplog):
    rows = changed_rows(lambda number, row: row.update(environment="retry" if number % 4 == 0 else "letters"))
    run = agent_run(
        ENDS, NO_TOOLS, f"data.train_files={rows}", f"{ROLLOUT}.agent.environment={HERE}:GAMES",
        f"{ROLLOUT}.multi_turn.enable=False", "data.shuffle=False", "reward.default_score=-1", ONE_STEP,
    )  # fmt: skip
    (row,) = run.training_rows()
    assert row["rollout/num_failed_episodes"] == 3
    assert row["response/aborted_ratio"] == 3 / 12
    assert row["critic/score/min"] >= 0
    assert "train/0/0 is left out: raised RuntimeError: the game is gone" in caplog.text


def test_a_run_whose_episodes_all_fail_stops(agent_run, caplog):
    with pytest.raises(
        RewardError, match="none of the 12 samples could be scored. The first: Episode train/0/0 raised"
    ):
        agent_run(
            ENDS, NO_TOOLS, f"{ROLLOUT}.agent.environment={HERE}:Retry", f"{ROLLOUT}.multi_turn.enable=False", ONE_STEP
        )
    assert "So are 7 more episodes of this step" in caplog.text


def test_a_run_that_starts_over_calls_its_tools(agent_run):
    """The first step samples the same tokens in both runs, but a repeated step finds only the calls of the same run."""
    first = agent_run(ENDS, ONE_STEP)
    again = agent_run(ENDS, ONE_STEP, "trainer.resume_mode=disable")
    (row,) = again.training_rows()
    assert row["rollout/num_tool_calls"] == len(episodes(again, "tool")) > 0
    assert row["rollout/num_replayed_tool_calls"] == 0
    assert list(first.folder.glob("superseded_*/episodes/*"))


def test_another_run_before_the_first_checkpoint_calls_its_tools(agent_run):
    agent_run(ENDS, ONE_STEP, "trainer.save_freq=-1")
    again = agent_run(ENDS, ONE_STEP, "trainer.save_freq=-1", "actor_rollout_ref.actor.optim.lr=0.001")
    assert again.training_rows()[0]["rollout/num_replayed_tool_calls"] == 0


@pytest.mark.parametrize("edits", [False, True])
def test_an_edited_tool_is_called_before_the_first_checkpoint(agent_run, tmp_path, edits):
    """Without an edit, the results that the earlier start has recorded hold."""
    tools = tmp_path / "tools.py"
    shutil.copy(TOOLS, tools)
    settings = (ENDS, ONE_STEP, "trainer.save_freq=-1", f"{ROLLOUT}.multi_turn.function_tool_path={tools}")
    first = agent_run(*settings)
    for checkpoint in first.folder.glob("global_step_*"):
        shutil.rmtree(checkpoint)
    if edits:
        tools.write_text(tools.read_text() + "\n")
    (row,) = agent_run(*settings).training_rows()
    assert (row["rollout/num_replayed_tool_calls"] == 0) == edits


@pytest.mark.parametrize("num_episodes", [7, pytest.param(20, marks=pytest.mark.slow)])
def test_results_of_tools_outlive_a_kill(agent_run, tmp_path, monkeypatch, num_episodes):
    """A run that dies within a step, before its first checkpoint or after it, calls no tool twice, and ends with the same
    samples and weights."""
    from verl.agents.driver import _Session
    from verl.registry import load_module

    echo_tools = load_module(str(TOOLS))

    def calls(name, folder, *changes):
        monkeypatch.setattr(echo_tools, "CALLS", tmp_path / name)
        try:
            return agent_run(ENDS, "trainer.save_freq=1", "trainer.total_training_steps=3", *changes, folder=folder)
        finally:
            monkeypatch.setattr(_Session, "_take", take)

    take = _Session._take
    unbroken = calls("whole.txt", "whole")

    def dies(self, arrived):
        ended = take(self, arrived)
        dies.count += len(ended)
        if dies.count > num_episodes:  # of the first step, or of the second
            raise RuntimeError("killed")
        return ended

    dies.count = 0
    monkeypatch.setattr(_Session, "_take", dies)
    with pytest.raises(RuntimeError, match="killed"):
        calls("cut.txt", "cut")
    cut = calls("cut.txt", "cut")
    assert digest(cut) == digest(unbroken)
    cut_lines, whole_lines = (Counter((tmp_path / name).read_text().split("\n")) for name in ("cut.txt", "whole.txt"))
    assert not whole_lines - cut_lines
    assert (cut_lines - whole_lines).total() <= 12  # calls that the kill has cut: at most one of each episode
    assert sum(row["rollout/num_replayed_tool_calls"] for row in cut.training_rows()) > 0
    files = [sorted(run.folder.glob("global_step_3/**/*.safetensors")) for run in (unbroken, cut)]
    assert files[0]
    assert [f.read_bytes() for f in files[0]] == [f.read_bytes() for f in files[1]]
