"""Parts of ranks, against the same division of arrays; and the names under which engines hold it."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reshard import reference
from verl.errors import ConfigError
from verl.parallel.mesh import Mesh
from verl.parallel.slices import cells, intersect, numel, subtract
from verl.reshard.grouping import consecutive_engines, interval_engines
from verl.reshard.hf_sharding import decoder_tensors
from verl.reshard.layout import Block, RolloutLayout, Tensor, TrainingLayout

small = st.integers(1, 7)
span = st.tuples(st.integers(0, 4), st.integers(1, 4)).map(lambda s: (s[0], s[0] + s[1]))
box = st.tuples(span, span)


def points(boxes):
    return sorted(itertools.chain.from_iterable(itertools.product(*(range(*s) for s in b)) for b in boxes))


@settings(max_examples=60, deadline=None)
@given(box, box)
def test_boxes_are_sets(a, b):
    shared = intersect(a, b)
    assert points([shared] if shared else []) == sorted(set(points([a])) & set(points([b])))
    assert points(subtract(a, b)) == sorted(set(points([a])) - set(points([b])))
    assert numel(a) == len(points([a]))


@st.composite
def tensors(draw):
    """Tensors of every kind, with sizes that divide by little."""
    kind = draw(st.sampled_from(["norm", "column", "row", "blocks", "heads", "vocabulary", "experts"]))
    a, b = draw(small), draw(small)
    if kind == "norm":
        return Tensor("norm", (a,))
    if kind == "column":
        return Tensor("column", (a, b), tensor_dim=0)
    if kind == "row":
        return Tensor("row", (a, b), tensor_dim=1)
    if kind == "blocks":
        return Tensor("blocks", (2 * a, b), tensor_dim=0, blocks=(Block(a), Block(a)))
    if kind == "heads":
        dim = draw(st.integers(0, 1))
        shape = (4 * a, b) if dim == 0 else (b, 4 * a)
        return Tensor("heads", shape, tensor_dim=dim, blocks=(Block(4 * a, draw(st.sampled_from([1, 2, 4]))),))
    if kind == "vocabulary":
        return Tensor("vocabulary", (8 * a - b, b), tensor_dim=0)
    return Tensor("experts", (4, 2 * a, b), tensor_dim=1, blocks=(Block(a), Block(a)), is_expert=True)


@st.composite
def training_layouts(draw):
    """Up to 16 ranks, axes in any order, ranks with any numbers; expert parallel where it divides."""
    sizes = {name: draw(st.sampled_from([1, 2, 3])) for name in ("replicate", "shard", "sp")} | {
        "tp": draw(st.sampled_from([1, 2, 4]))
    }
    while np.prod(list(sizes.values())) > 16:
        sizes[max(sizes, key=sizes.get)] = 1
    axes = draw(st.permutations(list(sizes)))
    count = int(np.prod(list(sizes.values())))
    ranks = draw(st.permutations(range(count)))
    over = sizes["shard"] * sizes["sp"] if sizes["shard"] * sizes["sp"] > 1 else sizes["replicate"]
    experts = draw(st.sampled_from([n for n in (1, 2, 4) if over % n == 0]))
    mesh = Mesh.grid(ranks, **{axis: sizes[axis] for axis in axes})
    return TrainingLayout(mesh, experts)


@settings(max_examples=80, deadline=None)
@given(training_layouts(), tensors())
def test_training_parts(layout, tensor):
    held = {}
    for rank in layout.ranks:
        expected, part = reference.trained(tensor, layout, rank), layout.part(tensor, rank)
        if expected.size == 0:
            assert part is None
            continue
        held[rank] = part
        assert part.shape == expected.shape
        np.testing.assert_array_equal(reference.local(tensor, part), expected)
    assert points(cell for cell, _ in cells(held)) == points([tuple((0, n) for n in tensor.shape)])
    for cell, owners in cells(held):
        for rank in owners:
            where = tuple(slice(*s) for s in held[rank].locate(cell))
            here = reference.trained(tensor, layout, rank)[where]
            np.testing.assert_array_equal(here, reference.elements(tensor)[tuple(slice(*s) for s in cell)])


@settings(max_examples=60, deadline=None)
@given(tensors(), st.sampled_from([1, 2, 4]), st.booleans())
def test_rollout_parts(tensor, tensor_parallel, by_experts):
    ranks = range(8)
    layout = RolloutLayout(
        consecutive_engines(ranks, tensor_parallel), expert_groups=((0, 2, 4, 6), (1, 3, 5, 7)) if by_experts else ()
    )
    for rank in ranks:
        expected, part = reference.generating(tensor, layout, rank), layout.part(tensor, rank)
        if expected.size == 0:
            assert part is None
        else:
            np.testing.assert_array_equal(reference.local(tensor, part), expected)


def test_pipeline_stages_hold_their_layers():
    layout = TrainingLayout(Mesh.grid(range(3), pp=3), layers_per_stage=(2, 1, 1))
    where = {
        layers: [r for r in range(3) if layout.part(Tensor("t", (4,), layers=layers), r)]
        for layers in [(-1,), (0,), (1,), (2,), (3,), (4,), (-1, 4)]
    }
    assert where == {(-1,): [0], (0,): [0], (1,): [0], (2,): [1], (3,): [2], (4,): [2], (-1, 4): [0, 2]}


def test_interval_groups_match_the_paper():
    """Training 1-4-2 and generation 1-2-2-2 on eight ranks (HybridFlow, section 5.3)."""
    training = reference.ptd(1, 4, 2, 1)
    assert interval_engines(training, 2) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert consecutive_engines(range(8), 2) == ((0, 1), (2, 3), (4, 5), (6, 7))


@pytest.mark.parametrize(("p", "t", "d", "t_g"), [(1, 4, 2, 2), (2, 4, 1, 2), (4, 2, 2, 1), (2, 4, 2, 4)])
def test_training_shards_lie_inside_generation_shards(p, t, d, t_g):
    training = reference.ptd(p, t, d, 4)
    rollout = RolloutLayout(interval_engines(training, t_g))
    assert rollout.ranks == training.ranks
    for tensor in reference.llama(16, 32, 4, 4, 4, vocabulary=64):
        for rank in training.ranks:
            held, needed = training.part(tensor, rank), rollout.part(tensor, rank)
            if held is not None:
                inside = {tuple(p) for p in points(needed.slices())}
                assert inside.issuperset(points(held.slices())), (tensor.name, rank)


def test_tensor_groups_stay_on_a_host_and_experts_with_their_ranks():
    training = TrainingLayout(Mesh.of(16), expert_parallel=4)
    hosts = {rank: rank // 8 for rank in range(16)}
    for engine in interval_engines(training, 4, hosts=hosts):
        assert len({hosts[rank] for rank in engine}) == 1
    assert interval_engines(training, 4)[0] == (0, 4, 8, 12)
    for group in reference.interval_experts(training, 4):
        assert [training.coordinates(rank).expert for rank in group] == [0, 1, 2, 3]


def test_pipeline_becomes_engines():
    training = reference.ptd(2, 2, 1, 4)
    assert interval_engines(training, 2) == ((0, 1), (2, 3))
    assert interval_engines(training, 1) == ((0,), (1,), (2,), (3,))


def test_names_say_how_tensors_are_divided():
    shapes = {
        "model.embed_tokens.weight": (10, 4),
        "model.layers.3.self_attn.k_proj.bias": (4,),
        "model.layers.3.self_attn.o_proj.weight": (4, 8),
        "model.layers.3.self_attn.o_proj.bias": (4,),
        "model.layers.3.self_attn.q_norm.weight": (2,),
        "model.layers.3.mlp.down_proj.lora_A": (2, 6),
        "model.layers.3.mlp.down_proj.lora_B": (4, 2),
        "model.layers.3.mlp.up_proj.lora_A": (2, 4),
        "model.layers.3.mlp.up_proj.lora_B": (6, 2),
        "model.layers.3.mlp.experts.down_proj": (3, 4, 6),
        "model.norm.weight": (4,),
        "score.weight": (1, 4),
    }
    described = decoder_tensors(shapes, num_layers=5, num_heads=4, num_kv_heads=2, is_tied=True)
    assert [t.tensor_dim for t in described] == [0, 0, 1, None, None, 1, None, None, 0, 2, None, None]
    assert [t.layers for t in described] == [(-1, 5), *[(3,)] * 9, (5,), (5,)]
    assert [t.name for t in described if t.is_expert] == ["model.layers.3.mlp.experts.down_proj"]


def test_fused_experts_are_divided_by_halves():
    """Of gate|up [experts, 2 x 6, hidden] the second of two tensor parallel ranks holds the last rows of both."""
    shapes = {"model.layers.0.mlp.experts.gate_up_proj": (3, 12, 4), "model.layers.0.mlp.experts.down_proj": (3, 4, 6)}
    gate_up, down = decoder_tensors(shapes, num_layers=1, num_heads=4, num_kv_heads=2)
    rollout = RolloutLayout(consecutive_engines(range(2), 2))
    assert rollout.part(gate_up, 1).spans == (((0, 3),), ((3, 6), (9, 12)), ((0, 4),))
    assert rollout.part(down, 1).spans == (((0, 3),), ((0, 4),), ((3, 6),))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TrainingLayout(Mesh.of(4), expert_parallel=3), "expert_parallel_size=3 does not divide the 4"),
        (lambda: TrainingLayout(Mesh.grid(range(2), pp=2)), "of each of the 2 pipeline stages"),
        (lambda: interval_engines(TrainingLayout(Mesh.of(4)), 3), "4 ranks do not divide into groups of 3"),
        (lambda: RolloutLayout(((0,), (1, 2))), "differ in size"),
        (lambda: RolloutLayout(((0, 1), (1, 2))), "contain a rank twice"),
        (lambda: Block(12, 3).span(2, 0), "2 tensor parallel ranks do not divide 3"),
    ],
)
def test_sizes_that_do_not_fit(make, words):
    with pytest.raises(ConfigError, match=words):
        make()
