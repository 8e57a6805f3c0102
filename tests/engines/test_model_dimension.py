"""The model dimension of the hybrid engine by layer or by head: the arrangement of the devices that each asks for."""

import pytest

from verl.config import FSDPConfig, load_config
from verl.engines.groups import mesh_of
from verl.errors import ConfigError

pytestmark = pytest.mark.seed("G2")
HEAD = {"use_3d_hybrid": True, "model_dimension": "head"}


@pytest.mark.parametrize(
    ("keys", "num_ranks", "same_as"),
    [
        (HEAD, 4, {"tensor_parallel_size": 4}),
        ({**HEAD, "fsdp_size": 2}, 4, {"tensor_parallel_size": 2, "fsdp_size": 1}),
        ({**HEAD, "ulysses_sequence_parallel_size": 2}, 4, {"tensor_parallel_size": 2, "ulysses_sequence_parallel_size": 2}),
        ({**HEAD, "model_dimension": "layer"}, 4, {}),
        ({**HEAD, "use_3d_hybrid": False}, 4, {}),
    ],
)  # fmt: skip
def test_devices_divide_heads_or_gather_layers(keys, num_ranks, same_as):
    """tests/engines/test_fsdp.py compares the results of the arrangements with one device."""
    assert mesh_of(FSDPConfig(**keys), num_ranks) == mesh_of(FSDPConfig(**same_as), num_ranks)


def test_the_header_says_it():
    assert FSDPConfig().describe().startswith("all data-parallel devices")
    assert "3D hybrid: model by head, sequences whole, 1 micro-batch between" in FSDPConfig(**HEAD).describe()
    assert "by head" not in FSDPConfig(**{**HEAD, "model_dimension": "layer"}).describe()


def test_the_key_as_the_documents_write_its_section():
    keys = ["actor_model.fsdp_config.use_3d_hybrid=True", "actor_model.fsdp_config.model_dimension=head"]
    assert load_config(keys, check=False).config.actor_rollout_ref.actor.fsdp_config.model_dimension == "head"
    with pytest.raises(ConfigError, match="model_dimension"):
        load_config(["actor_model.fsdp_config.use_3d_hybrid=True", "actor_model.fsdp_config.model_dimension=row"])


def test_groups_that_do_not_divide():
    with pytest.raises(ConfigError, match="do not divide"):
        mesh_of(FSDPConfig(**HEAD, fsdp_size=3), 4)
