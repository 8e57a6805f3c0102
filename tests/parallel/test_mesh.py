"""Mesh arithmetic: shares of rows, who answers, and sizes that do not divide."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.errors import ConfigError
from verl.parallel.mesh import Mesh

sizes = st.integers(1, 3)


@settings(max_examples=40, deadline=None)
@given(replicate=sizes, shard=sizes, sp=sizes, tp=sizes)
def test_every_share_has_one_rank_that_answers(replicate, shard, sp, tp):
    count = replicate * shard * sp * tp
    mesh = Mesh.of(range(10, 10 + count), fsdp_size=shard, sequence_parallel=sp, tensor_parallel=tp)
    assert mesh.size == count
    assert mesh.dp_size == replicate * shard
    assert [mesh.dp_rank(i) for i in range(count)] == [i // (sp * tp) for i in range(count)]
    assert [mesh.dp_rank(i) for i in mesh.collectors()] == list(range(mesh.dp_size))
    for i in range(count):
        where = mesh.coordinate(i)
        assert ((where["replicate"] * shard + where["shard"]) * sp + where["sp"]) * tp + where["tp"] == i


def test_ranks_of_a_model_parallel_group_see_the_same_rows():
    mesh = Mesh.of(8, tensor_parallel=2)
    assert [mesh.dp_rank(i) for i in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert mesh.collectors() == [0, 2, 4, 6]
    assert dict(mesh.axes) == {"replicate": 1, "shard": 4, "sp": 1, "tp": 2}


def test_flat():
    mesh = Mesh.flat([3, 5])
    assert (mesh.dp_size, mesh.collectors(), mesh.ranks) == (2, [0, 1], (3, 5))


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"tensor_parallel": 3}, "8 devices do not divide"),
        ({"sequence_parallel": 5}, "ulysses_sequence_parallel_size"),
        ({"tensor_parallel": 0}, "do not divide"),
        ({"fsdp_size": 3}, "fsdp_size=3 does not divide the 8"),
    ],
)
def test_sizes_that_do_not_divide(axes, words):
    with pytest.raises(ConfigError, match=words):
        Mesh.of(8, **axes)
