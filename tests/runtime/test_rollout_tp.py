"""Generation by groups of ranks that share one rollout replica: tokens, losses and weights equal a single process's."""

import pytest
import torch

from tests.runtime.conftest import PPO, REWARD, assert_same, assert_same_weights, train_here
from tests.runtime.ranks import run
from verl.config import load_config
from verl.errors import ConfigError
from verl.models.tiny import make_tiny_model
from verl.parallel.placement import Placement
from verl.programs.ppo_roles import ppo_roles
from verl.runtime.rank import RankContext, check_meshes

SIZE = "actor_rollout_ref.rollout.tensor_model_parallel_size"
ENGINE = "actor_rollout_ref.actor.fsdp_config"
CARRIED = "trainer.placement={actor:[0],rollout:[0,1]}"


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """PPO with one sample of each prompt; the model's vocabulary does not divide by 2, and its heads are normed."""
    path = make_tiny_model(
        tmp_path_factory.mktemp("models") / "odd", "qwen3", vocab_size=265, tie_word_embeddings=False
    )
    return [*PPO, f"actor_rollout_ref.model.path={path}", "actor_rollout_ref.rollout.n=1"]


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """A reward function that writes a byte per call into a file next to it."""
    folder = tmp_path_factory.mktemp("counted")
    (folder / "reward.py").write_text(
        REWARD.replace("compute_score", "_score")
        + f"""

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    with open({str(folder / "calls")!r}, "a") as file:
        file.write(".")
    return _score(data_source, solution_str, ground_truth)
"""
    )
    return folder


@pytest.fixture(scope="module")
def alone(jobs, odd):
    """Runs of a single process, whose sampler computes directly from the weights; a divided model's sampler calls modules."""
    return {"grpo": train_here(jobs, "grpo1"), "odd": train_here(jobs, "odd1", *odd)}


@pytest.fixture(scope="module")
def two_ranks(jobs, odd):
    jobs.add("grpo2", f"{SIZE}=2")
    jobs.add("odd2", f"{SIZE}=2", *odd)
    jobs.add("carried2", f"{SIZE}=2", CARRIED)
    run(2, "tests.runtime.several_runs", jobs.file(), timeout_s=300)
    return jobs


def assert_equal(ours, reference):
    assert_same(ours, reference, rel=1e-10)
    assert_same_weights(ours, reference, 3, rel=1e-10)


def test_prompts_with_several_samples(two_ranks, alone):
    assert_equal(two_ranks.run("grpo2"), alone["grpo"])


def test_a_rank_stores_the_keys_of_its_heads(two_ranks, alone):
    for ours, whole in zip(two_ranks.run("grpo2").rows, alone["grpo"].rows, strict=True):
        assert 2 * ours["rollout/kv_cache_bytes"] == whole["rollout/kv_cache_bytes"] > 0


def test_prompts_with_one_sample_and_an_odd_vocabulary(two_ranks, alone):
    assert_equal(two_ranks.run("odd2"), alone["odd"])


def test_weights_of_the_only_rank_that_trains(two_ranks, alone):
    assert_equal(two_ranks.run("carried2"), alone["grpo"])


@pytest.mark.slow
def test_two_copies_on_four_ranks(jobs, alone, counted):
    ours = jobs.add("grpo4", f"{SIZE}=2", f"reward.custom_reward_function.path={counted}/reward.py")
    run(4, "tests.runtime.several_runs", jobs.file(), timeout_s=300)
    assert_equal(ours, alone["grpo"])
    num_samples = sum(len(rows) for rows in ours.samples().values())
    assert len((counted / "calls").read_text()) == num_samples, "each sample is scored once, where it was made"


def check(base, *changes, num_devices=4):
    config = load_config([*base, *changes]).config
    placement = Placement.from_roles(config.trainer.placement, num_devices)
    specs = ppo_roles(config)
    check_meshes(specs, placement)
    return RankContext(specs, placement, 0, torch.device("cpu"), 1, [])


def test_arrangement(base):
    mesh = check(base, f"{SIZE}=2", num_devices=4).rollout_mesh()
    assert (mesh.dp_size, mesh.collectors()) == (2, [0, 2])
    assert [mesh.dp_rank(i) for i in range(4)] == [0, 0, 1, 1]
    # FSDP 4 holds quarters of rows in the order of ranks: ranks 0 and 1 belong into the first halves of two copies
    assert mesh.ranks == (0, 2, 1, 3)
    tensor = check(base, f"{SIZE}=2", f"{ENGINE}.tensor_parallel_size=2").rollout_mesh()
    assert tensor.ranks == (0, 1, 2, 3), "halves of a row lie on neighbours already"
    apart = check(base, f"{SIZE}=2", "trainer.placement={actor:[0,1],rollout:[0,1,2,3]}").rollout_mesh()
    assert apart.ranks == (0, 1, 2, 3), "those that do not train are neighbours"
    assert check(base, num_devices=4).rollout_mesh().collectors() == [0, 1, 2, 3]
    assert check(base, f"{SIZE}=2", num_devices=1).rollout_mesh().size == 1  # there is nothing to divide


@pytest.mark.parametrize(
    ("changes", "num_devices", "match"),
    [
        ([f"{SIZE}=2"], 3, "3 devices of the rollout do not divide"),
        ([f"{SIZE}=0"], 2, f"{SIZE}=0: sizes of a rollout's groups must be at least 1"),
        ([f"{SIZE}=2", "trainer.placement={actor:[0],rollout:[1]}"], 2, "1 devices of the rollout"),
        ([f"{SIZE}=4"], 4, f"{SIZE}=4 does not fit the model: .* 2 key-value heads"),
        ([f"{SIZE}=2", "actor_rollout_ref.rollout.name=hf"], 2, "rollout.name=native"),
    ],
)
def test_arrangements_that_cannot_be(base, changes, num_devices, match):
    with pytest.raises(ConfigError, match=match):
        check(base, *changes, num_devices=num_devices)


def test_it_is_not_read_on_one_device_and_says_so(base, monkeypatch):
    def mentioned(*changes):
        return [n for n in load_config([*base, f"{SIZE}=2", *changes]).notices if SIZE in n]

    assert "No effect" in mentioned()[0]
    assert mentioned("trainer.n_gpus_per_node=2") == []
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert mentioned() == []
