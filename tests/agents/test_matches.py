"""Games of two players: the policy plays against itself."""

import pytest

from tests.agents.test_runs import ENDS, ROLLOUT, episodes
from tests.agents.test_ways import HERE, NO_TOOLS, ONE_STEP, digest
from verl.agents import games
from verl.errors import ConfigError

DUEL = [NO_TOOLS, f"{ROLLOUT}.multi_turn.enable=False", f"{ROLLOUT}.agent.environment={HERE}:Duel", f"{ROLLOUT}.n=4"]


def test_each_player_is_a_row(agent_run):
    run = agent_run(ENDS, *DUEL, ONE_STEP)
    (row,) = run.training_rows()
    assert row["training/rollout_probs_diff_max"] < 1e-5
    assert row["rollout/num_failed_episodes"] == 0
    assert row["rollout/num_episodes"] == 16
    by_name = {e["episode"]: e for e in episodes(run)}
    won = 0
    for ordinal in range(4):
        for sample in (0, 2):
            first, second = (by_name[f"train/{ordinal}/{sample + player}"] for player in (0, 1))
            assert first["reward"] + second["reward"] in (0.0, 1.0)
            won += first["reward"] + second["reward"]
            read = [[m["content"] for m in e["messages"] if m["role"] == "user"] for e in (first, second)]
            assert read[0][0].endswith(f"Game {ordinal}, move 0.")
            assert read[0][1:] == [f"Game {ordinal}, move 2."]
            assert len(read[1]) == 1
            assert read[1][0].endswith(f"Game {ordinal}, move 1.")
    assert won > 0
    assert row["critic/score/mean"] == pytest.approx(won / 16)
    one_at_a_time = agent_run(ENDS, *DUEL, ONE_STEP, f"{ROLLOUT}.agent.max_episodes=2", folder="slow")
    assert digest(one_at_a_time) == digest(run)


def test_a_player_who_cannot_move_ends_the_game(agent_run):
    run = agent_run(ENDS, *DUEL, ONE_STEP, f"{ROLLOUT}.multi_turn.max_assistant_turns=1")
    records = episodes(run)
    assert all(e["reward"] == 0 and e["error"] is None for e in records)
    assert not any(e["extra"]["finished"] for e in records)


def test_a_game_that_breaks_fails_for_both(agent_run):
    run = agent_run(ENDS, *DUEL, ONE_STEP, f"{ROLLOUT}.agent.environment={HERE}:BrokenDuel")
    (row,) = run.training_rows()
    assert row["rollout/num_failed_episodes"] == 8  # the games of two prompts of four
    why = {e["error"] for e in episodes(run)} - {None}
    assert why == {"raised RuntimeError: the game is gone", "its game ended because the episode of player 1 failed"}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ([f"{ROLLOUT}.n=3"], "multiple of 2"),
        ([f"{ROLLOUT}.agent.max_episodes=1"], "2 players of a game"),
        ([f"{ROLLOUT}.prefetch_num=1", f"{ROLLOUT}.partial_rollout=True"], "pauses single episodes"),
    ],
)
def test_games_that_could_not_begin_are_refused(agent_run, changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        agent_run(ENDS, *DUEL, ONE_STEP, *changes)


def test_two_play_a_game_of_textarena(agent_run, changed_rows):
    pytest.importorskip("textarena", reason="needs the extra environments", exc_type=ImportError)
    game = games.TextArenaSelfPlay()
    game.reset(seed=3, game="TicTacToe-v0")
    read = {0: [], 1: []}
    for player, move in enumerate(("[0]", "[1]", "[4]", "[2]", "[8]")):
        mover, text = game.observe()
        assert mover == player % 2
        read[mover].append(text)
        done = game.step(move)
    assert done
    assert game.rewards() == {0: 1, 1: -1}
    assert "You are Player 1" in read[1][0]
    assert "You are Player 1" not in read[1][1]  # only the new text
    rows = changed_rows(lambda _, row: row.update(game="TicTacToe-v0"))
    run = agent_run(
        ENDS, *DUEL, ONE_STEP, f"{ROLLOUT}.agent.environment=verl.agents.games:TextArenaSelfPlay",
        "data.max_prompt_length=576", f"data.train_files={rows}", "data.max_response_length=440",
        f"{ROLLOUT}.multi_turn.max_tool_response_length=2000",
    )  # fmt: skip
    (row,) = run.training_rows()
    assert row["training/rollout_probs_diff_max"] < 1e-5
    played = [e["reward"] for e in episodes(run) if e["error"] is None]
    assert set(played) == {-1.0}  # a random model says no valid move, and its opponent has no turn
