"""Groups of ranks that share one rollout replica: their arrangement, and two of them. One of them: test_reshard_runs.py."""

import pytest
import torch

from tests.runtime.conftest import REWARD, assert_same, assert_same_weights, train_here
from tests.runtime.ranks import run
from verl.config import load_config
from verl.errors import ConfigError
from verl.parallel.placement import Placement
from verl.programs.ppo_roles import ppo_roles
from verl.runtime.rank import RankContext, check_meshes

SIZE = "actor_rollout_ref.rollout.tensor_model_parallel_size"
ENGINE = "actor_rollout_ref.actor.fsdp_config"


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


@pytest.mark.slow
def test_two_copies_on_four_ranks(jobs, counted):
    ours = jobs.add("grpo4", f"{SIZE}=2", f"reward.custom_reward_function.path={counted}/reward.py")
    run(4, "tests.runtime.several_runs", jobs.file(), timeout_s=300)
    alone = train_here(jobs, "grpo1")
    assert_same(ours, alone, rel=1e-10)
    assert_same_weights(ours, alone, 3, rel=1e-10)
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
        (
            [f"{SIZE}=2", "actor_rollout_ref.rollout.name=hf"],
            2,
            f"{SIZE}=2 needs a rollout engine that divides .*: native, vllm, sglang",
        ),
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
