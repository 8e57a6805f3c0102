"""Roles on devices: config, script and pools end in one Placement; what cannot be is refused with a sentence."""

import pytest

from verl.config import load_config
from verl.errors import ConfigError
from verl.parallel.placement import DataParallelConfig, Placement, set_device_map
from verl.programs.specs import placement_of

pytestmark = pytest.mark.seed("A3", "E3")


def placed(*overrides, num_devices=None):
    return placement_of(load_config(["actor_rollout_ref.model.path=x", *overrides], check=False).config, num_devices)


@pytest.fixture(autouse=True)
def _no_map():
    yield
    set_device_map(None)


def test_all_roles_share_all_devices_by_default():
    placement = placed("trainer.n_gpus_per_node=4", "trainer.nnodes=2")
    assert placement.num_devices == 8
    assert placement.num_nodes == 2
    assert set(placement.pools()) == {tuple(range(8))}
    assert placement.describe() == "actor, rollout, reference, critic, reward on 0-7"
    assert placed().num_devices == 1


def test_roles_apart():
    placement = placed("trainer.n_gpus_per_node=4", "trainer.placement={actor:[0,1],critic:[2],reward_model:[3]}")
    assert placement.devices["rollout"] == placement.devices["reference"] == (0, 1)
    assert placement.devices["reward"] == (3,)
    assert placement.roles_of(2) == ["critic"]
    assert placement.describe() == "actor, rollout, reference on 0-1; critic on 2; reward on 3"
    assert placement.describe({"actor", "reward"}) == "actor on 0-1; reward on 3"


def test_the_script_goes_before_the_config():
    set_device_map(DataParallelConfig(actor_devices=[0, 1], critic_devices=[2], reward_model_devices=[3]))
    placement = placed("trainer.placement={critic:[0]}")
    assert placement.num_devices == 4
    assert placement.devices["critic"] == (2,)
    set_device_map(None)
    assert placed().num_devices == 1


def test_rollout_on_separate_machines():
    placement = placed(
        "trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=3"
    )
    assert placement.devices["actor"] == (0, 1)
    assert placement.devices["rollout"] == placement.devices["reward"] == (2, 3, 4)
    assert placement.num_nodes == 1  # both pools of one machine: the same one
    assert placed("trainer.nnodes=2", "actor_rollout_ref.rollout.nnodes=1").num_nodes == 3


def test_a_launcher_says_how_many():
    assert placed(num_devices=4).num_devices == 4
    assert placed("trainer.n_gpus_per_node=2", num_devices=2).num_devices == 2
    with pytest.raises(ConfigError, match="2 processes were started .* asks for 4"):
        placed("trainer.n_gpus_per_node=4", num_devices=2)


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        ({"actr": [0]}, "did you mean 'actor'"),
        ({"critic": []}, r"devices of critic are \[\]"),
        ({"critic": [0, 0]}, "named twice"),
        ({"critic": [-1]}, "whole number from 0"),
        ({"critic": [4]}, "device 4, but the run has 2"),
        ({"actor": [0], "critic": [0]}, "No role is placed on device 1"),
    ],
)
def test_placements_that_cannot_be(roles, words):
    with pytest.raises(ConfigError, match=words):
        Placement.from_roles(roles, 2)
    if "has 2" not in words and "No role" not in words:
        with pytest.raises(ConfigError):
            placed("trainer.n_gpus_per_node=2", f"trainer.placement={roles}".replace("'", ""))
