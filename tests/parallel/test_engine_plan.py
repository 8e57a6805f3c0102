"""Devices of a rollout engine: every rank in one replica, and the same replicas whatever the mode is called."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.config import load_config
from verl.errors import ConfigError
from verl.parallel.engine_plan import EnginePlan, Sizes, plan_engine
from verl.programs.specs import placement_of, rollout_spec

ROLLOUT = "actor_rollout_ref.rollout"


@st.composite
def layouts(draw):
    """(engine, mode, ranks, sizes, devices of the run, devices of a machine) that divide; the rollout may have a pool of its
    own, after the devices that train."""
    tensor, data = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3))
    engine, mode = draw(st.sampled_from(["native", "vllm", "sglang"])), draw(st.sampled_from(["sync", "async"]))
    per_node = tensor * draw(st.integers(1, 4))
    num_nodes = draw(st.integers(1, 3)) * data
    own_pool = draw(st.booleans())
    first = per_node * draw(st.integers(1, 2)) if own_pool else 0
    count = per_node * num_nodes
    sizes = Sizes(tensor, data, expert=draw(st.sampled_from([1, tensor])))
    return engine, mode, range(first, first + count), sizes, first + count, per_node


def plan(layout):
    engine, mode, ranks, sizes, num_devices, per_node = layout
    return plan_engine(engine, mode, ranks, sizes, num_devices=num_devices, devices_per_node=per_node)


@given(layouts())
def test_every_rank_is_in_one_replica(layout):
    _, _, ranks, sizes, num_devices, per_node = layout
    placed = plan(layout)
    assert placed.ranks == tuple(ranks)
    if num_devices == 1:
        return
    size = sizes.tensor
    assert {len(replica.ranks) for replica in placed.replicas} == {size}
    assert len(placed.replicas) == len(ranks) // size
    assert len(placed.replicas) % sizes.data == 0
    for replica in placed.replicas:
        assert replica.owner == min(replica.ranks)
        assert [placed.replica_of(rank) for rank in replica.ranks] == [replica] * size
        assert [replica.node * per_node + device for device in replica.devices] == list(replica.ranks)
    engines = [rank for rank in ranks if placed.runs_engine(rank)]
    assert engines == (list(ranks) if placed.where == "ranks" else [replica.owner for replica in placed.replicas])


@given(layouts())
def test_prompts_are_divided_over_replicas_and_owners_answer(layout):
    placed = plan(layout)
    mesh = placed.mesh
    assert mesh.dp_size == len(placed.replicas)
    assert [mesh.ranks[index] for index in mesh.collectors()] == [replica.owner for replica in placed.replicas]
    shares = {replica: {mesh.dp_rank(mesh.ranks.index(rank)) for rank in replica.ranks} for replica in placed.replicas}
    assert list(shares.values()) == [{number} for number in range(len(placed.replicas))]


@given(layouts())
def test_the_mode_changes_no_replica(layout):
    engine, _, *rest = layout
    assert plan((engine, "sync", *rest)).replicas == plan((engine, "async", *rest)).replicas


@given(st.integers(2, 64), st.integers(2, 9), st.integers(1, 4), st.sampled_from(["native", "vllm", "sglang"]))
def test_sizes_that_do_not_divide_are_refused_by_both_keys(count, tensor, data, engine):
    def planned():
        return plan_engine(
            engine, "async", range(count), Sizes(tensor, data), num_devices=count, devices_per_node=count,
            devices_key=f"trainer.n_gpus_per_node={count}",
        )  # fmt: skip

    if count % (tensor * data) == 0:
        assert len(planned().replicas) == count // tensor
        return
    keys = rf"{ROLLOUT}.tensor_model_parallel_size={tensor}.*trainer.n_gpus_per_node={count}\)"
    with pytest.raises(ConfigError, match=keys):
        planned()


def of(*overrides, num_devices=None):
    config = load_config(
        [f"{ROLLOUT}.{key}" if "." not in key.split("=")[0] else key for key in overrides], check=False
    )
    return EnginePlan.of(rollout_spec(config.config), placement_of(config.config, num_devices))


NODES = ("trainer.nnodes=4", "trainer.n_gpus_per_node=8")


@pytest.mark.parametrize(
    ("overrides", "where", "engines", "devices"),
    [
        (("name=native", "tensor_model_parallel_size=2"), "ranks", 1, ()),  # one device: there is nothing to divide
        (("name=vllm", "mode=sync"), "ranks", 1, (0,)),
        (("name=vllm", "mode=sync", "tensor_model_parallel_size=2"), "process", 1, (0, 1)),
        (("name=vllm", "tensor_model_parallel_size=2"), "process", 1, (0, 1)),
        ((*NODES, "name=vllm", "tensor_model_parallel_size=2"), "process", 16, (6, 7)),
        ((*NODES, "name=vllm", "tensor_model_parallel_size=8", "data_parallel_size=2"), "process", 4, tuple(range(8))),
        ((*NODES, "name=vllm", "tensor_model_parallel_size=2", "mode=sync"), "ranks", 16, (6, 7)),
        ((*NODES, "name=sglang", "tensor_model_parallel_size=4"), "process", 8, (4, 5, 6, 7)),
        ((*NODES, "name=vllm", "nnodes=1", "n_gpus_per_node=8", "mode=sync"), "process", 8, (7,)),
        ((*NODES, "name=http"), "service", 1, ()),
        ((*NODES, "name=sglang", f"{ROLLOUT}.service.url=http://127.0.0.1:1"), "service", 1, ()),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_launches(overrides, where, engines, devices):
    placed = of(*overrides)
    assert (placed.where, len(placed.replicas)) == (where, engines)
    if devices:
        assert placed.replicas[-1].devices == devices
    assert placed.engine in placed.describe()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("trainer.n_gpus_per_node=3", "name=vllm", "tensor_model_parallel_size=2"), "trainer.n_gpus_per_node=3"),
        (("name=vllm", "data_parallel_size=2"), "The 1 devices of the rollout do not divide"),
        ((*NODES, "name=vllm", "tensor_model_parallel_size=16"), "on several nodes"),
        ((*NODES, "name=vllm", "tensor_model_parallel_size=0"), "at least 1"),
        ((*NODES, "name=vllm", "pipeline_model_parallel_size=2"), "no rollout engine divides layers into stages"),
        ((*NODES, "name=hf", "tensor_model_parallel_size=2"), "whole model on each device"),
        ((*NODES, "name=vllm", "tensor_model_parallel_size=2", "data_parallel_size=8", "expert_parallel_size=16"), "experts"),
        (
            (*NODES, "name=vllm", "nnodes=1", "n_gpus_per_node=3", "tensor_model_parallel_size=2"),
            f"{ROLLOUT}.nnodes=1 x {ROLLOUT}.n_gpus_per_node=3",
        ),
    ],
)  # fmt: skip
def test_layouts_that_there_are_not(overrides, words):
    with pytest.raises(ConfigError, match=words) as error:
        of(*overrides)
    assert f"{ROLLOUT}." in str(error.value)
