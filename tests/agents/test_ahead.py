"""Episodes ahead of training: parts under changing weights, and their state after a kill."""

from dataclasses import replace

import numpy as np
import pytest

from tests.agents.test_driver import PARAMS, agent, engine_of, events, module, tasks  # noqa: F401 - fixtures
from tests.agents.test_runs import ENDS, ROLLOUT, episodes
from tests.agents.test_ways import digest
from tests.json_lines import read_lines
from tests.letters_task import write_reward
from verl.agents.driver import EpisodeDriver
from verl.agents.episode import EpisodeResult

LONG = f"{ROLLOUT}.stop_token_ids={list(range(12))}"  # turns of some twenty tokens
AHEAD = (LONG, f"{ROLLOUT}.prefetch_num=2", f"{ROLLOUT}.partial_rollout=True", "trainer.total_training_steps=4")


def in_parts(module, events, part, run_episode):  # noqa: F811
    """Results of all tasks, each made in parts of so many sampled tokens."""
    driver = EpisodeDriver(engine_of(module), events, max_episodes=100, timeout_s=60.0, filler=258)
    waiting = [replace(task, part=part, stop_token_ids=frozenset({*PARAMS.stop_token_ids, 258})) for task in tasks()]
    done, num_pauses = {}, 0
    while waiting:
        results = driver.run(waiting, run_episode, PARAMS, step=1)
        paused = [r for r in results if r.error is None and r.trajectory.can_resume(r.task.limit)]
        assert all(0 < int(r.trajectory.to_row().response_mask.sum()) for r in paused)
        done |= {(r.task.ordinal, r.task.sample): r for r in results if r not in paused}
        num_pauses += len(paused)
        waiting = [replace(r.task, so_far=r.trajectory) for r in paused]
    return [done[key] for key in sorted(done)], num_pauses


@pytest.mark.parametrize("part", [1, 7, 12])
def test_parts_make_the_sample_of_the_whole(module, events, part):  # noqa: F811
    unbroken, none = in_parts(module, events, None, agent())
    resumed, num_pauses = in_parts(module, events, part, agent())
    assert none == 0 < num_pauses
    for a, b in zip(unbroken, resumed, strict=True):
        assert a.trajectory.response_ids == b.trajectory.response_ids
        row, other = a.trajectory.to_row(), b.trajectory.to_row()
        assert (row.response_mask == other.response_mask).all()
        np.testing.assert_allclose(row.log_probs, other.log_probs, atol=1e-5)


def test_an_agent_that_acts_otherwise_is_left_out(module, events, caplog):  # noqa: F811
    taken = []

    async def fickle(episode):
        taken.append(episode.task.name)
        prompt = [*episode.task.prompt_ids, 100 + taken.count(episode.task.name)]
        done = await episode.generate(prompt)
        return EpisodeResult(
            episode.task, episode.trajectory(prompt, done.token_ids, [1] * len(done.token_ids), "stop")
        )

    results, num_pauses = in_parts(module, events, 2, fickle)
    failed = [r for r in results if r.error]
    assert len(failed) == num_pauses > 0
    assert "did not do again what it had done" in failed[0].error
    assert not failed[0].trajectory.to_row().response_mask.any()
    assert failed[0].trajectory.num_response_tokens == 3  # the tokens it had, and the token of a failure


@pytest.mark.slow
def test_episodes_continue_under_newer_weights(agent_run):
    run = agent_run(*AHEAD)
    rows = run.training_rows()
    assert [row["training/off_policy/trajectory_staleness/max"] for row in rows] == [0, 1, 2, 2]
    assert max(row["training/off_policy/trajectory_spans/max"] for row in rows) >= 1
    generated = [row for row in rows if "rollout/num_episodes" in row]  # the last step may only train
    assert sum(row["rollout/num_paused_episodes"] for row in generated) > 0
    assert sum(row["rollout/num_failed_episodes"] for row in generated) == 0
    names = [(r["episode"], r["call"]) for r in episodes(run, "tool")]
    assert len(names) == len(set(names)) > 0  # no call was made again for the next part


@pytest.mark.slow
def test_whole_episodes_ahead(agent_run):
    """Without parts; with fewer slots the same samples."""
    ahead = (f"{ROLLOUT}.prefetch_num=1", "trainer.total_training_steps=3")
    first, second = agent_run(ENDS, *ahead), agent_run(ENDS, *ahead, f"{ROLLOUT}.max_num_seqs=3", folder="again")
    assert [row["training/off_policy/trajectory_staleness/mean"] for row in first.training_rows()] == [0, 1, 1]
    assert digest(first) == digest(second)


@pytest.mark.slow
@pytest.mark.parametrize("games", [False, True])
def test_a_resumed_run_has_its_episodes_ahead(agent_run, agent_task, tmp_path, ends_after, games):
    """Episodes that had paused or waited at the checkpoint: their prompts, rewards and what reaches the reward function."""
    reward = write_reward(tmp_path, "return extra_info['num_turns'] / 10 + len(solution_str) / 1000")
    changes = [*AHEAD, reward, "trainer.save_freq=1"]
    if games:
        changes += [
            f"{ROLLOUT}.multi_turn.function_tool_path=null", f"{ROLLOUT}.multi_turn.enable=False",
            f"{ROLLOUT}.agent.environment=tests/agents/agents_of_users.py:Letters",
        ]  # fmt: skip
    unbroken = agent_run(*changes)
    ends_after(2)
    agent_run(*changes, folder="cut")
    cut = agent_run(*changes, folder="cut")
    assert digest(cut) == digest(unbroken)
    files = [sorted(run.folder.glob("global_step_4/**/*.safetensors")) for run in (unbroken, cut)]
    assert files[0]
    assert [f.read_bytes() for f in files[0]] == [f.read_bytes() for f in files[1]]
    scores = [row["critic/score/mean"] for row in read_lines(cut.folder / "metrics.jsonl")]
    assert min(scores) > 0
