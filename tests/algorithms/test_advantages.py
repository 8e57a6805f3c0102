"""Contract of the advantage estimators: one row each, hand-worked numbers, a float64 loop reference and the laws."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms.advantage_references import HAND, TABLE, TURNS
from tests.algorithms.batches import (
    PAD_VALUES,
    advantage_columns,
    close,
    insert_observations,
    map_columns,
    remove_observations,
    widen,
)
from verl.algorithms.advantages import ADVANTAGES, compute_advantage, register_adv_est, requires
from verl.algorithms.advantages.returns import move_rewards_to_trained_tokens
from verl.algorithms.advantages.turns import turn_numbers
from verl.algorithms.masked import masked_whiten
from verl.errors import ConfigError

estimators = pytest.mark.parametrize("name", sorted(TABLE))


def run(name, columns, **settings):
    return compute_advantage(name, columns, **settings)


def columns_for(name, seed):
    return advantage_columns(seed, singles=TABLE[name].singles)


def test_the_table_has_every_estimator():
    assert set(TABLE) == set(ADVANTAGES.built_in), "give the estimator a row of TABLE"


@estimators
def test_hand_worked(name):
    row = TABLE[name]
    advantages, returns = run(name, HAND, **row.hand_settings)
    close(advantages, row.advantages, 1e-7)  # masked_whiten's own 1e-8 is not worked out on paper
    close(returns, row.returns, 1e-7)


@estimators
@settings(max_examples=8, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31))
def test_equals_the_loop_reference(name, seed):
    row = TABLE[name]
    columns = columns_for(name, seed)
    advantages, returns = run(name, columns, **row.settings)
    expected_advantages, expected_returns = row.reference(columns, **row.settings)
    # masked_mean's 1e-8 in the denominator is below the tolerance
    close(advantages, expected_advantages, 1e-7)
    close(returns, expected_returns, 1e-9)
    assert not advantages[~columns["response_mask"]].any()
    assert not returns[~columns["response_mask"]].any()


@estimators
def test_padding_does_not_matter(name):
    columns, more = columns_for(name, 1), TABLE[name].settings
    padded = map_columns(columns, lambda n, x: widen(x, PAD_VALUES.get(n, float("nan"))))
    for plain, wide in zip(run(name, columns, **more), run(name, padded, **more)):
        close(wide[:, :6], plain)
        assert not wide[:, 6:].any()


@estimators
def test_rows_may_come_in_any_order(name):
    columns, more = columns_for(name, 2), TABLE[name].settings
    order = torch.tensor([5, 2, 6, 0, 3, 1, 4])
    moved = map_columns(columns, lambda _, x: x[order])
    moved["uid"] = [columns["uid"][i] for i in order]
    for plain, permuted in zip(run(name, columns, **more), run(name, moved, **more)):
        close(permuted, plain[order])


@estimators
def test_group_labels_are_only_labels(name):
    columns = columns_for(name, 3)
    for labels in ({"a": 7, "b": -1, "c": 900}, {"a": "z", "b": "y", "c": "x"}):
        renamed = {**columns, "uid": np.array([labels[u] for u in columns["uid"]], dtype=object)}
        for one, other in zip(run(name, columns), run(name, renamed)):
            close(other, one)


@estimators
def test_tool_output_in_the_middle_does_not_matter(name):
    if not TABLE[name].slides:
        pytest.skip("compares rows by position (the tir_ variant is for tool output), or by what the tools said")
    columns, more = columns_for(name, 4), TABLE[name].settings
    positions = [1, 3, 0, 2, 1, 1, 4]

    def insert(n, x):
        return insert_observations(x, positions, 2, PAD_VALUES.get(n, 3.0)) if x.dim() == 2 else x

    for plain, spaced in zip(run(name, columns, **more), run(name, map_columns(columns, insert), **more)):
        close(remove_observations(spaced, positions, 2), plain)


@estimators
@pytest.mark.parametrize("seed", range(3))
def test_rows_without_a_score_change_no_other_row(name, seed):
    columns, settings = columns_for(name, seed), TABLE[name].settings
    expected = run(name, columns, **settings)
    num_rows = len(columns["uid"])
    both = map_columns(columns, lambda column, x: torch.cat([x, x]))
    both["uid"] = [*columns["uid"], *(u if columns["uid"].count(u) > 1 else f"other {u}" for u in columns["uid"])]
    both["token_level_rewards"][num_rows:] = 7.0  # a default score
    both["is_scored"] = torch.arange(2 * num_rows) < num_rows
    for both_rows, scored_rows in zip(run(name, both, **settings), expected, strict=True):
        close(both_rows[:num_rows], scored_rows, 1e-9)
        assert not both_rows[num_rows:].any()


@pytest.mark.parametrize("name", sorted(TABLE))
def test_the_only_scored_row_of_a_group_is_compared_with_nothing(name):
    columns = {**HAND, "is_scored": torch.tensor([True, False])}
    advantages, _ = run(name, columns, **TABLE[name].hand_settings)
    assert not advantages[1].any()
    compares = "uid" in requires(name)
    assert bool(advantages[0].any()) != compares or name in ("gae", "turn_gae", "reinforce_plus_plus")


@estimators
def test_dtype_stays_and_any_mask_type_serves(name):
    columns = columns_for(name, 5)
    exact = run(name, columns)
    single = map_columns(columns, lambda _, x: x.float() if x.is_floating_point() else x.long())
    for a, b in zip(run(name, single), exact):
        assert a.dtype == torch.float32
        assert b.dtype == torch.float64
        close(a, b, 1e-4)


def test_a_column_called_index_does_not_replace_the_groups():
    columns = columns_for("grpo", 9)
    other = {**columns, "index": list(range(7))}
    close(run("grpo", other)[0], run("grpo", columns)[0])
    by_index = {**{k: v for k, v in columns.items() if k != "uid"}, "index": columns["uid"]}
    close(run("grpo", by_index)[0], run("grpo", columns)[0])


def test_groups_of_equal_rewards_have_advantage_exactly_zero():
    rewards = torch.full((8, 1), 0.1)
    columns = {"token_level_rewards": rewards, "response_mask": torch.ones(8, 1), "uid": ["g"] * 8}
    for name in ("grpo", "rloo", "gpg", "grpo_passk"):
        assert not run(name, columns)[0].any(), name


def test_a_single_sample():
    columns = {
        "token_level_rewards": torch.tensor([[0.0, 2.0]], dtype=torch.float64),
        "response_mask": torch.ones(1, 2, dtype=torch.bool),
        "uid": ["only"],
    }
    close(run("grpo", columns)[0], [[2 / (1 + 1e-6)] * 2])
    for name in ("rloo", "rloo_vectorized", "opo", "gpg"):
        close(run(name, columns)[0], [[2.0, 2.0]])
    with pytest.raises(ConfigError, match=r"rollout\.n"):
        run("grpo_passk", columns)


def test_a_reward_on_tool_output_goes_to_the_last_trained_token():
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0], [2.0, 0.0, 5.0, 0.0]])
    mask = torch.tensor([[True, True, False, False], [False, True, True, False]])
    close(move_rewards_to_trained_tokens(rewards, mask), [[0, 1, 0, 0], [0, 0, 5, 0]])
    columns = {"token_level_rewards": rewards[:1], "response_mask": mask[:1], "reward_baselines": torch.zeros(1)}
    close(run("remax", columns)[0], [[1, 1, 0, 0]])


def test_turns_are_the_runs_of_trained_tokens():
    mask = torch.tensor([[1, 1, 0, 1, 0, 0, 1, 0], [0, 0, 1, 1, 1, 0, 0, 0], [0] * 8]).bool()
    assert turn_numbers(mask).tolist() == [[0, 0, -1, 1, -1, -1, 2, -1], [-1, -1, 0, 0, 0, -1, -1, -1], [-1] * 8]
    columns = {**columns_for("turn_gae", 10), "responses": torch.zeros(7, 6, dtype=torch.long)}
    for name in TURNS:
        derived = run(name, {k: v for k, v in columns.items() if k != "turn_ids"})
        explicit = run(name, {**columns, "turn_ids": turn_numbers(columns["response_mask"])})
        for one, other in zip(derived, explicit):
            close(one, other)


def test_of_one_turn_the_estimators_match_the_response_ones():
    columns = advantage_columns(11, holes=False)
    one_turn = {**columns, "turn_ids": turn_numbers(columns["response_mask"])}
    pairs = torch.tensor([0, 2, 3, 6, 1, 5])  # groups of more than one sample
    several = map_columns(one_turn, lambda _, x: x[pairs])
    several["uid"] = [columns["uid"][i] for i in pairs]
    expected = run("grpo", several)[0]
    close(run("turn_grpo", several, gamma=0.5)[0], expected)
    close(run("gigpo", several, gamma=0.5, step_advantage_w=3.0)[0], 4 * expected)
    without_values = {**one_turn, "values": torch.zeros_like(columns["values"])}
    scores = without_values["token_level_rewards"].sum(-1, keepdim=True).expand(-1, 6)
    close(run("turn_gae", without_values)[0], masked_whiten(scores, without_values["response_mask"]))


@pytest.mark.parametrize("name", TURNS)
def test_a_token_that_the_correction_rejects_splits_no_turn(name):
    columns = advantage_columns(12, holes=False)
    columns["turn_ids"] = turn_numbers(columns["response_mask"])
    columns["token_level_rewards"] = columns["token_level_rewards"].clone()
    rejected = columns["response_mask"].clone()
    rejected[0, 2] = False
    names = {"norm_adv_by_std_in_grpo": False} if name != "turn_gae" else {}
    uncut, cut = run(name, columns, **names), run(name, {**columns, "response_mask": rejected}, **names)
    close(cut[1], torch.where(rejected, uncut[1], 0.0))


def test_a_turn_without_a_like_trains_nothing():
    columns = {**HAND, "uid": np.array(["p", "q"], dtype=object)}
    assert not run("turn_grpo", columns)[0].any()
    close(run("gigpo", columns)[0], run("grpo", columns)[0])
    nobody = {**HAND, "response_mask": torch.zeros(2, 2), "turn_ids": torch.full((2, 2), -1)}
    for name in TURNS:
        assert not run(name, nobody)[0].any()


def test_requirements_follow_the_signature():
    assert requires("gae") == {"token_level_rewards", "response_mask", "values"}
    assert "reward_baselines" in requires("remax")
    assert {"sum_pi_squared", "old_log_probs", "uid"} <= requires("optimal_token_baseline")
    assert "rollout_is_weights" not in requires("optimal_token_baseline")
    assert "reward_parts" in requires("gdpo")
    with pytest.raises(ConfigError, match="did you mean 'grpo'"):
        requires("grop")


@pytest.mark.parametrize("name", ["gae", "remax", "optimal_token_baseline", "grpo", "gdpo"])
def test_a_missing_column_is_named(name):
    column = (requires(name) - {"token_level_rewards", "response_mask"}).pop()
    columns = {k: v for k, v in columns_for(name, 0).items() if k != column}
    with pytest.raises(ConfigError, match=f"'{name}' needs the column '{column}'"):
        run(name, columns)


def test_gdpo_reads_parts_of_each_row():
    columns = columns_for("gdpo", 6)
    parts = columns["reward_parts"]
    rows = np.array([{"x": float(parts["x"][i]), "y": float(parts["y"][i])} for i in range(7)], dtype=object)
    by_row = run("gdpo", {**columns, "reward_parts": rows}, gdpo_reward_keys=["x", "y"])
    close(by_row[0], run("gdpo", columns)[0])
    with_score = run("gdpo", {**columns, "reward_parts": rows}, gdpo_reward_keys=["score", "x"])
    scores = {"score": columns["token_level_rewards"].sum(-1), "x": parts["x"]}
    close(with_score[0], run("gdpo", {**columns, "reward_parts": scores})[0])
    for keys, match in ((None, "gdpo_reward_keys"), (["z"], "reward part 'z'")):
        with pytest.raises(ConfigError, match=match):
            run("gdpo", {**columns, "reward_parts": rows}, gdpo_reward_keys=keys)
    with pytest.raises(ConfigError, match="one weight"):
        run("gdpo", columns, gdpo_reward_weights=[1.0])


def test_users_estimators():
    @register_adv_est("test_old_contract")
    def old_contract(token_level_rewards, response_mask, config=None, index=None, **kwargs):
        assert config.get("gamma") == 0.5
        assert config["gamma"] == config.gamma == 0.5
        assert config.get("absent", 3) == 3
        assert list(index) == columns["uid"]
        assert "reward_baselines" in kwargs
        advantages = token_level_rewards.sum(-1, keepdim=True) * (1 - (1 - response_mask))
        return advantages, advantages

    columns = columns_for("grpo", 7)
    advantages, _ = run("test_old_contract", columns, config={"gamma": 0.5})
    close(advantages, columns["token_level_rewards"].sum(-1, keepdim=True) * columns["response_mask"])

    @register_adv_est("test_wrong_result")
    def wrong_result(token_level_rewards, response_mask):
        return token_level_rewards

    with pytest.raises(ConfigError, match=r"must return \(advantages, returns\)"):
        run("test_wrong_result", columns)


def test_an_estimator_from_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def halves(token_level_rewards, response_mask, *, index):\n    a = response_mask / 2\n    return a, a\n"
    )
    name = f"{file}:halves"
    assert requires(name) == {"token_level_rewards", "response_mask", "uid"}
    columns = columns_for("grpo", 8)
    close(run(name, columns)[0], columns["response_mask"] / 2)
