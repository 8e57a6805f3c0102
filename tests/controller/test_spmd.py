"""Every rank runs the program: tokens, losses and weights are those of a single process."""

import pytest

from tests.controller.conftest import PPO, assert_same, assert_same_weights, train_here
from tests.controller.ranks import run

SPLIT = "trainer.placement={rollout:[0],actor:[1],critic:[0],reference:[1],reward:[1]}"
FLOAT32 = "actor_rollout_ref.actor.fsdp_config.dtype=float32"


@pytest.fixture(scope="module")
def two_ranks(jobs):
    """All runs on two ranks, in one start of two processes."""
    jobs.add("grpo2")
    jobs.add("ppo2", *PPO)
    jobs.add("split2", *PPO, SPLIT)
    jobs.add("float2", FLOAT32, "trainer.save_freq=-1")
    jobs.add("resumed2", "trainer.total_training_steps=2", "trainer.save_freq=2", "trainer.test_freq=-1")
    jobs.add("resumed2", "trainer.save_freq=3", "trainer.test_freq=3")
    run(2, "tests.controller.several_runs", jobs.file(), timeout_s=150)
    return jobs


@pytest.fixture(scope="module")
def grpo(jobs):
    return train_here(jobs, "grpo1")


@pytest.fixture(scope="module")
def ppo(jobs):
    return train_here(jobs, "ppo1", *PPO)


def test_grpo(two_ranks, grpo):
    assert_same(two_ranks.run("grpo2"), grpo, rel=1e-9)
    assert_same_weights(two_ranks.run("grpo2"), grpo, 3, rel=1e-6)


def test_ppo_with_critic_reference_and_shuffled_mini_batches(two_ranks, ppo):
    assert_same(two_ranks.run("ppo2"), ppo, rel=1e-9)
    for role in ("actor", "critic"):
        assert_same_weights(two_ranks.run("ppo2"), ppo, 3, rel=1e-6, role=role)


def test_roles_on_ranks_of_their_own(two_ranks, ppo):
    """Weights travel from the rank that trains to the one that generates, scores are made on the other one."""
    assert_same(two_ranks.run("split2"), ppo, rel=1e-9)
    assert_same_weights(two_ranks.run("split2"), ppo, 3, rel=1e-6)


def test_float32(two_ranks, jobs):
    reference = train_here(jobs, "float1", FLOAT32, "trainer.save_freq=-1")
    assert_same(two_ranks.run("float2"), reference, rel=1e-4)


def test_a_resumed_run_is_the_unbroken_one(two_ranks, grpo):
    assert_same_weights(two_ranks.run("resumed2"), grpo, 3, rel=1e-6)
    assert [row["step"] for row in two_ranks.run("resumed2").rows] == [1, 2, 3]


def test_the_other_rank_has_a_log_and_writes_nothing_else(two_ranks):
    folder = two_ranks.run("grpo2").folder
    assert (folder / "logs" / "rank_1.log").exists()
    assert len(two_ranks.run("grpo2").rows) == 3


def test_a_checkpoint_of_two_ranks_goes_on_in_one_process(two_ranks, jobs, grpo):
    import shutil

    source = two_ranks.run("resumed2").folder
    target = jobs.run("alone").folder
    target.mkdir()
    shutil.copytree(source / "global_step_2", target / "global_step_2")
    run_alone = train_here(jobs, "alone")
    assert_same_weights(run_alone, grpo, 3, rel=1e-6)
