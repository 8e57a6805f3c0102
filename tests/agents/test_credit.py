"""Credit over turns: rewards at the ends of turns, estimators of turns, episodes that do not train."""

import numpy as np
import pytest
import torch

from tests.agents.test_runs import ENDS, ROLLOUT, episodes
from tests.agents.test_ways import HERE, NO_TOOLS, ONE_STEP, digest
from tests.config.helpers import load
from tests.letters_task import write_reward
from verl.algorithms.advantages import compute_advantage
from verl.algorithms.groups import without_missing
from verl.data_proto.merge import object_array
from verl.data_proto.proto import DataProto
from verl.data_proto.samples import Score
from verl.roles.reward import RewardWorker

INTERACTIONS = """
interaction:
  - name: judge
    class_name: tests.agents.loops_of_users.Judge
    config: {patience: 2}
"""
LETTERS = [NO_TOOLS, f"{ROLLOUT}.multi_turn.enable=False", f"{ROLLOUT}.agent.environment={HERE}:Letters"]


class FixedScores:
    """A reward manager that gives every sample 0.5."""

    def submit(self, request):
        pass

    def collect(self, keys):
        return {key: Score(key, 0.5) for key in keys}


def collected(turn_rewards, reward, error=None, mask=(1, 1, 0, 1, 0, 0), config=True):
    """Token scores of one episode of five tokens: two turns, and two tokens of a tool."""
    batch = DataProto.from_dict(
        {
            "responses": torch.arange(6)[None],
            "response_mask": torch.tensor([mask], dtype=torch.bool),
            "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0]], dtype=torch.bool),
            **dict.fromkeys(("ordinal", "sample_index"), torch.tensor([0])),
        },
        {
            **dict.fromkeys(("sample_split", "data_source"), object_array(["train"])),
            "episode_reward": object_array([reward]),
            "episode_error": object_array([error]),
            "episode_extra": object_array([{"turn_rewards": turn_rewards}]),
        },
    )
    tokenizer = type("Tokenizer", (), {"decode": lambda self, ids, **_: ""})()
    worker = RewardWorker(FixedScores(), None, tokenizer, -1.0, turn_rewards=config)
    return worker.collect(batch).batch["token_level_scores"][0].tolist()


def test_turns_are_rewarded_at_their_ends():
    assert collected([0.25, 0.5], 0.75) == [0, 0.25, 0, 0.5, 0, 0]
    assert collected([0.25, 0.5], 1.0) == [0, 0.25, 0, 0.5, 0.25, 0]  # 0.25 in addition to the turns' rewards
    assert collected([0.25], None) == [0, 0.25, 0, 0, 0.5, 0]  # and the score of the reward function
    assert collected([0.25, 0.5], 0.75, config=False) == [0, 0, 0, 0, 0.75, 0]
    assert collected([0.25, 0.5], None, error="broke") == [0, 0, 0, 0, 0, 0]
    assert collected([0.25, 0.5], 0.75, mask=(0,) * 6) == [0, 0, 0, 0, 0.75, 0]


def test_players_are_compared_with_their_own_seat():
    """The first player of each game wins because of its seat, not because of its actions."""
    mask = torch.ones(4, 2, dtype=torch.bool)
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.75], [0.0, 0.25]])
    extras = object_array([{"player": row % 2} for row in range(4)])
    columns = {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "uid": object_array(["a"] * 4),
        "episode_extra": extras,
    }
    advantages, _ = compute_advantage("grpo", columns, norm_adv_by_std_in_grpo=False)
    assert advantages[:, 0].tolist() == [0.125, -0.125, -0.125, 0.125]


def test_failed_episodes_are_compared_with_nothing():
    labels = without_missing(np.array(["a", "a", "b"], dtype=object), [True, False, True])
    assert labels[0] == "a"
    assert labels[2] == "b"
    assert labels[1] not in labels[::2]


@pytest.mark.parametrize("estimator", ["turn_grpo", "gigpo", "turn_gae"])
def test_a_game_trains_by_turns(agent_run, estimator):
    critic = ["critic.optim.lr=0.001", "critic.ppo_micro_batch_size_per_gpu=4"] if estimator == "turn_gae" else []
    run = agent_run(
        ENDS, *LETTERS, f"algorithm.adv_estimator={estimator}", "algorithm.gamma=0.9", ONE_STEP, *critic,
        f"{ROLLOUT}.agent.turn_discount=0.5",
    )  # fmt: skip
    (row,) = run.training_rows()
    assert row["training/rollout_probs_diff_max"] < 1e-5
    assert row["actor/grad_norm"] > 0
    games = episodes(run)
    assert {game["messages"][0]["content"].rsplit("\n", 1)[1] for game in games} == {f"Game {i}." for i in range(4)}
    assert row["num_turns/max"] <= 7
    assert 0 < row["critic/score/max"] <= 1.75  # 1 + 0.5 + 0.25
    for game in games:
        scores, turns = game["extra"]["rollout_reward_scores"]["turn_scores"], game["extra"].get("turn_rewards", [])
        assert turns == pytest.approx([0.5**k * score for k, score in enumerate(scores)] if any(scores) else [])
    assert row["critic/score/mean"] == pytest.approx(np.mean([game["reward"] for game in games]))
    if estimator == "turn_gae":
        assert row["critic/returns/max"] > row["critic/returns/min"] >= 0
        assert row["critic/grad_norm"] > 0


def test_where_a_reward_is_changes_no_sample(agent_run):
    at_end, by_turn = (
        agent_run(ENDS, *LETTERS, ONE_STEP, f"{ROLLOUT}.agent.turn_rewards={on}", folder=str(on))
        for on in (False, True)
    )
    assert digest(at_end) == digest(by_turn)
    first, second = at_end.training_rows()[0], by_turn.training_rows()[0]
    assert second["critic/score/mean"] == pytest.approx(first["critic/score/mean"], rel=1e-6)
    assert second["actor/grad_norm"] == pytest.approx(first["actor/grad_norm"], rel=1e-3)  # GRPO reads their sum


def test_answers_of_a_user_reward_turns(agent_run, changed_rows, tmp_path):
    rows = changed_rows(lambda _, row: row.update(extra_info={"interaction_kwargs": {"name": "judge", "want": "a"}}))
    (tmp_path / "users.yaml").write_text(INTERACTIONS)
    scores = "extra_info['rollout_reward_scores'].get('turn_scores', [])"
    run = agent_run(
        ENDS, NO_TOOLS, f"data.train_files={rows}", ONE_STEP, f"{ROLLOUT}.agent.turn_rewards=True",
        f"{ROLLOUT}.multi_turn.interaction_config_path={tmp_path}/users.yaml",
        write_reward(tmp_path, f"return sum({scores}) + extra_info['num_turns'] / 100"), "reward.num_workers=1",
    )  # fmt: skip
    (row,) = run.training_rows()
    assert row["num_turns/max"] == 5  # two answers of the user and two turns of the model, and the prompt
    finished = [e for e in episodes(run) if e["extra"]["finished"]]
    assert finished
    assert all(e["extra"]["turn_rewards"] == [0.25, 0.25] for e in finished)
    assert row["critic/score/max"] == pytest.approx(
        2 * 0.25 + 2 * 0.25 + 0.05
    )  # the function's score, and the user's rewards


def test_unfinished_episodes_do_not_train(agent_run):
    run = agent_run(
        ENDS, *LETTERS, ONE_STEP, f"{ROLLOUT}.agent.mask_unfinished_episodes=True",
        f"{ROLLOUT}.multi_turn.max_assistant_turns=2",  # of the three that the game has
    )  # fmt: skip
    (row,) = run.training_rows()
    assert row["actor/grad_norm"] == 0
    assert row["rollout/num_failed_episodes"] == 0
    assert row["critic/score/max"] > 0


def test_a_game_needs_no_reward_function(agent_run):
    run = agent_run(ENDS, *LETTERS, ONE_STEP, "reward.custom_reward_function.path=null")
    assert run.training_rows()[0]["critic/score/max"] > 0  # no built-in scorer knows the rows' data_source


def test_estimators_of_turns_want_turns():
    assert any(
        "the samples of this run have one each" in notice for notice in load("algorithm.adv_estimator=gigpo").notices
    )
    config = load("algorithm.adv_estimator=gigpo", f"{ROLLOUT}.n=2", f"{ROLLOUT}.agent.environment=a.py:Game").config
    assert config.actor_rollout_ref.rollout.agent.turn_rewards
    assert not load("algorithm.adv_estimator=grpo").config.actor_rollout_ref.rollout.agent.turn_rewards
