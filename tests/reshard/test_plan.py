"""Plans against sets of elements, against the paper's table, and against a full gather."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reshard import reference
from tests.reshard.reference import bytes_of, full_gather, interval_experts, llama, lower_bound, mixture, ptd
from tests.reshard.test_layout import points, tensors, training_layouts
from verl.errors import ConfigError
from verl.parallel.mesh import Mesh
from verl.parallel.slices import cut, numel
from verl.reshard.grouping import consecutive_engines, interval_engines
from verl.reshard.layout import RolloutLayout, Tensor, TrainingLayout
from verl.reshard.plan import Move, buckets, make_plan

pytestmark = pytest.mark.seed("C1")

LLAMA_7B = (4096, 11008, 32, 32, 32)
LLAMA_13B = (5120, 13824, 40, 40, 40)
LLAMA_34B = (8192, 22016, 48, 64, 8)
LLAMA_70B = (8192, 28672, 80, 64, 8)

# sizes, training p-t-d, generation t_g: Fig. 14 and 15 of the paper, the example of section 5.3, and a pipeline
PAPER = [
    (LLAMA_7B, (1, 8, 2), 2),
    (LLAMA_13B, (1, 8, 2), 4),
    (LLAMA_34B, (4, 8, 1), 8),
    (LLAMA_70B, (8, 8, 2), 8),
    (LLAMA_7B, (1, 8, 2), 1),
    (LLAMA_13B, (1, 8, 2), 8),
    (LLAMA_7B, (1, 4, 2), 2),
    (LLAMA_7B, (4, 4, 1), 2),
]


def nonzero(sums):
    return {rank: count for rank, count in sums.items() if count}


@st.composite
def problems(draw):
    """Two or three tensors, a training layout, and engines over its ranks, other ranks, or both."""
    training = draw(training_layouts())
    count = len(training.ranks)
    kind = draw(st.sampled_from(["interval", "consecutive", "elsewhere", "overlapping"]))
    ranks = {
        "interval": training.ranks,
        "consecutive": training.ranks,
        "elsewhere": range(count, count + 4),
        "overlapping": range(count - 1, count + 3),
    }[kind]
    t_g = draw(st.sampled_from([n for n in (1, 2, 4) if len(ranks) % n == 0]))
    hosts = {rank: draw(st.integers(0, 1)) for rank in range(count + 4)} if draw(st.booleans()) else None
    groups = interval_engines(training, t_g, hosts) if kind == "interval" else consecutive_engines(ranks, t_g)
    experts = consecutive_engines(ranks, 2) if len(ranks) % 2 == 0 and draw(st.booleans()) else ()
    rollout = RolloutLayout(groups, experts)
    chosen = draw(st.lists(tensors(), min_size=2, max_size=3))
    return [replace(t, name=f"{i}") for i, t in enumerate(chosen)], training, rollout, hosts


@settings(max_examples=120, deadline=None)
@given(problems())
def test_plans_move_what_is_lacking_and_nothing_else(problem):
    model, training, rollout, hosts = problem
    plan = make_plan(model, training, rollout, hosts)
    lacking = dict.fromkeys(rollout.ranks, 0)
    for tensor in model:
        held = {rank: set(reference.trained(tensor, training, rank).flat) for rank in training.ranks}
        for rank in rollout.ranks:
            expected = reference.generating(tensor, rollout, rank)
            lacking[rank] += len(set(expected.flat) - held.get(rank, set())) * tensor.itemsize
    assert plan.received_bytes == nonzero(lacking)
    assert lower_bound(model, training, rollout) == lacking
    assert plan.total_bytes == sum(lacking.values()) == sum(plan.sent_bytes.values())
    assert plan == make_plan(model, training, rollout, hosts)


@settings(max_examples=120, deadline=None)
@given(problems())
def test_carrying_out_a_plan_makes_the_rollout_parts(problem):
    """Every element arrives exactly once, out of what its source holds, and lands where the engine reads it."""
    model, training, rollout, hosts = problem
    plan = make_plan(model, training, rollout, hosts)
    for tensor in model:
        for rank in rollout.ranks:
            expected = reference.generating(tensor, rollout, rank)
            arrived = np.full(expected.shape, -1)
            for move in plan.moves:
                if (move.tensor, move.destination) != (tensor.name, rank):
                    continue
                source = reference.trained(tensor, training, move.source)
                cut = tuple(slice(*s) for s in training.part(tensor, move.source).locate(move.slice))
                put = tuple(slice(*s) for s in rollout.part(tensor, rank).locate(move.slice))
                assert (arrived[put] == -1).all()
                arrived[put] = source[cut]
                assert move.num_bytes == (0 if move.is_kept else source[cut].size * tensor.itemsize)
            np.testing.assert_array_equal(arrived, expected)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_sources_are_near(problem):
    model, training, rollout, hosts = problem
    by_name = {t.name: t for t in model}
    for move in make_plan(model, training, rollout, hosts).moves:
        tensor = by_name[move.tensor]
        part = reference.elements(tensor)[tuple(slice(*s) for s in move.slice)]
        holders = [r for r in training.ranks if set(part.flat) <= set(reference.trained(tensor, training, r).flat)]
        assert move.source in holders
        assert move.is_kept == (move.destination in holders)
        if hosts and not move.is_kept and any(hosts[r] == hosts[move.destination] for r in holders):
            assert hosts[move.source] == hosts[move.destination]


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 5), st.integers(1, 3), st.lists(st.integers(1, 30), min_size=1, max_size=12))
def test_replicas_send_alike(num_replicas, num_engines, sizes):
    """No replica has more to send than another by more than one move."""
    model = [Tensor(str(i), (size,)) for i, size in enumerate(sizes)]
    training = TrainingLayout(Mesh.flat(range(num_replicas)))
    rollout = RolloutLayout(consecutive_engines(range(10, 10 + num_engines), 1))
    plan = make_plan(model, training, rollout)
    sent = [plan.sent_bytes.get(rank, 0) for rank in training.ranks]
    assert max(sent) - min(sent) <= max(move.num_bytes for move in plan.moves)


def test_a_choice_makes_up_for_what_is_forced():
    """Only rank 0 has the first tensor; the second, which rank 1 has too, then comes from rank 1."""
    model = [Tensor("both", (10,), layers=(-1, 1)), Tensor("first", (10,), layers=(0,))]
    training = TrainingLayout(Mesh.grid(range(2), pp=2), layers_per_stage=(1, 1))
    plan = make_plan(model, training, RolloutLayout(((2,),)))
    assert [(m.tensor, m.source) for m in plan.moves] == [("both", 1), ("first", 0)]


@pytest.mark.parametrize(("sizes", "train", "t_g"), PAPER)
def test_table_2(sizes, train, t_g):
    """(d_g - 1)/(t p) M per GPU for divided tensors; for norms, which all tensor parallel ranks hold, only p counts."""
    p, t, d = train
    layers = 2 * p
    hidden, intermediate, _, heads, kv_heads = sizes
    model = llama(hidden, intermediate, layers, heads, kv_heads)
    split, undivided = [[x for x in model if (x.tensor_dim is not None) == s] for s in (True, False)]
    training = ptd(p, t, d, layers)
    hosts = {rank: rank // 8 for rank in training.ranks}
    rollout = RolloutLayout(interval_engines(training, t_g, hosts))
    count, d_g = len(training.ranks), p * t // t_g
    plan = make_plan(split, training, rollout, hosts)
    assert plan.total_bytes * t * p == (d_g - 1) * bytes_of(split) * count
    assert plan.received_bytes == nonzero(lower_bound(split, training, rollout))
    assert make_plan(undivided, training, rollout, hosts).total_bytes * p == bytes_of(undivided) * count * (p - 1)
    if p == 1:  # every GPU alike; with a pipeline the first and last stages also have the embeddings
        assert set(plan.received_bytes.values()) <= {plan.total_bytes // count}
    # the other columns: less than a replica's gather, which is less than the gather over all GPUs
    table = [(d_g - 1) / (t * p), (t * p - 1) / (t * p), (t * p * d - 1) / (t * p * d)]
    everything = make_plan(model, training, rollout, hosts).total_bytes / bytes_of(model) / count
    assert everything == pytest.approx(table[0], rel=2e-3)
    assert everything <= table[1] <= table[2]
    if t_g < t * p:
        consecutive = RolloutLayout(consecutive_engines(training.ranks, t_g))
        assert plan.total_bytes <= make_plan(split, training, consecutive, hosts).total_bytes


def test_numbers_of_the_paper():
    """70B on 128 GPUs: each receives 7/64 of about 140 GB, where the gathers bring all but a little of it."""
    layers = LLAMA_70B[2]
    model, training = llama(*LLAMA_70B), ptd(8, 8, 2, layers)
    rollout = RolloutLayout(interval_engines(training, 8, {rank: rank // 8 for rank in training.ranks}))
    bound = lower_bound(model[:12], training, rollout)  # a layer and a bit, for speed
    assert sum(bound.values()) / 128 == pytest.approx(7 / 64 * bytes_of(model[:12]), rel=1e-3)
    assert bytes_of(model) == pytest.approx(138e9, rel=0.01)


def test_consecutive_groups_cost_more():
    """Training 1-4-2 to generation 1-2-2-2: at intervals a GPU receives M/4, with neighbours M/2 where nothing overlaps."""
    model = [t for t in llama(*LLAMA_7B[:2], 2, 32, 32) if t.tensor_dim is not None]
    training, size = ptd(1, 4, 2, 2), bytes_of(model)
    interval = make_plan(model, training, RolloutLayout(interval_engines(training, 2)))
    consecutive = make_plan(model, training, RolloutLayout(consecutive_engines(range(8), 2)))
    assert set(interval.received_bytes.values()) == {size // 4}
    assert consecutive.received_bytes == {r: size // (2 if r in (1, 2, 5, 6) else 4) for r in range(8)}
    assert interval.sent_bytes == interval.received_bytes


EXPERTS_TWO = TrainingLayout(Mesh.of(2), expert_parallel=2)


@pytest.mark.parametrize(
    ("model", "training", "t_g", "experts", "share"),
    [
        (llama(512, 1024, 2, 8, 4), TrainingLayout(Mesh.of(4, tensor_parallel=4)), 2, (), 1 / 3),
        (llama(512, 1024, 2, 8, 4), TrainingLayout(Mesh.of(4, tensor_parallel=2)), 2, (), 1 / 3),
        (llama(512, 1024, 2, 8, 8), TrainingLayout(Mesh.of(8, tensor_parallel=8)), 4, (), 1 / 7),
        (mixture(64, 256, 2, 4, 16), EXPERTS_TWO, 1, interval_experts(EXPERTS_TWO, 2), 0.0217),
        (llama(512, 1024, 4, 8, 8), ptd(4, 8, 1, 4), 8, (), 3 / 31),
    ],
    ids=["four_ranks_tensor", "two_by_two", "eight_to_four", "experts_two", "pipeline_four"],
)
def test_bytes_against_a_full_gather(model, training, t_g, experts, share):
    """The baseline: each rank gathers every parameter whole over the training ranks, in the rollout's dtype or
    in the float32 in which it is trained. No plan could do better: each equals its lower bound."""
    rollout = RolloutLayout(interval_engines(training, t_g), experts)
    plan = make_plan(model, training, rollout)
    assert plan.total_bytes == sum(lower_bound(model, training, rollout).values())
    gathered = sum(full_gather(model, training, rollout.ranks).values())
    float32 = sum(full_gather(model, training, rollout.ranks, held_itemsize=4).values())
    assert plan.total_bytes / gathered == pytest.approx(share, rel=0.1)
    assert plan.total_bytes / float32 == pytest.approx(share / 2, rel=0.1)
    assert 1 - plan.total_bytes / float32 >= 0.8


def test_same_layout_moves_nothing():
    model, training = llama(64, 96, 2, 4, 4, vocabulary=128), TrainingLayout(Mesh.of(4, tensor_parallel=4))
    plan = make_plan(model, training, RolloutLayout(interval_engines(training, 4)))
    assert (plan.total_bytes, plan.sent_bytes, plan.received_bytes) == (0, {}, {})
    assert sum(move.is_kept for move in plan.moves) == 4 * len(model)


def test_back_to_the_training_layout():
    """The planner treats layouts alike: the way back returns to each rank the elements that it gave up."""
    model, training = llama(64, 96, 2, 4, 4, vocabulary=128), TrainingLayout(Mesh.of(4))
    rollout = RolloutLayout(interval_engines(training, 2))
    assert make_plan(model, training, rollout).total_bytes > 0
    back = make_plan(model, rollout, training)
    assert back.received_bytes == nonzero(lower_bound(model, rollout, training))


def test_bytes_between_hosts_are_few():
    """Replicas on two hosts: everything comes from the own one."""
    training = TrainingLayout(Mesh.grid(range(8), replicate=2, tp=4))
    hosts = {rank: rank // 4 for rank in range(8)}
    model = llama(64, 96, 2, 4, 4, vocabulary=128)
    plan = make_plan(model, training, RolloutLayout(interval_engines(training, 2, hosts)), hosts)
    assert plan.total_bytes > 0
    assert all(hosts[move.source] == hosts[move.destination] for move in plan.moves)


def test_something_that_nobody_holds():
    training = TrainingLayout(Mesh.grid(range(2), pp=2), layers_per_stage=(1, 1))
    model = [Tensor("late", (4,), layers=(1,))]

    class Half:
        ranks = (0,)
        stages_of = training.stages_of
        part = training.part

    with pytest.raises(ConfigError, match="Rollout rank 5 needs 4 elements of late that no training rank holds"):
        make_plan(model, Half(), RolloutLayout(((5,),)))


def test_plans_of_large_models_are_made_quickly():
    """Layers are alike, so the geometry is worked out once: moves come at microseconds each."""
    layers = LLAMA_34B[2]
    model, training = llama(*LLAMA_34B), ptd(4, 8, 1, layers)
    plan = make_plan(model, training, RolloutLayout(interval_engines(training, 8)))
    assert len(plan.moves) == 32 * len(model)
    assert math.isclose(plan.total_bytes, 32 * 3 / 32 * bytes_of(model), rel_tol=1e-3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(1, 40))
def test_cuts_of_a_slice(shape, max_elements):
    region = tuple((3, 3 + size) for size in shape)
    parts = cut(region, max_elements)
    assert all(numel(part) <= max_elements for part in parts)
    assert points(parts) == points([region])


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(2, 200))
def test_no_rank_has_more_than_its_bound(problem, max_bytes):
    plan = make_plan(*problem)
    groups = buckets(plan.moves, max_bytes)
    for bucket in groups:
        for rank in {r for move in bucket for r in (move.source, move.destination)}:
            assert sum(m.num_bytes for m in bucket if rank in (m.source, m.destination)) <= max_bytes
    travelling = [move for move in plan.moves if not move.is_kept]
    for move in travelling:
        parts = [m.slice for b in groups for m in b if (m.tensor, *m[1:3]) == (move.tensor, *move[1:3])]
        assert set(points(parts)) >= set(points([move.slice]))
    assert sum(m.num_bytes for b in groups for m in b) == plan.total_bytes


def test_buckets_are_as_full_as_their_order_allows():
    """Ranks 0 and 1 exchange at most 60 bytes a bucket: two moves of 30. Other ranks' moves share the bucket."""
    moves = [Move("a", 0, 1, ((0, 15),), 30), Move("b", 2, 3, ((0, 20),), 40), Move("c", 0, 1, ((0, 15),), 30)]
    moves += [Move("d", 1, 1, ((0, 9),), 0), Move("e", 1, 0, ((0, 1),), 2)]
    assert [[m.tensor for m in bucket] for bucket in buckets(moves, 60)] == [["a", "b", "c"], ["e"]]
