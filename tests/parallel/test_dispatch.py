"""collect(split(x)) == x, for every mode, uneven sizes and nested meshes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parallel.batches import Shape, make_batch, rows_of
from verl.data_proto.metrics import Metric, metric_values
from verl.data_proto.proto import DataProto
from verl.errors import DataError
from verl.parallel.balance import TokenCost, balanced_shares, contiguous_shares
from verl.parallel.dispatch import join_rows, plan_call
from verl.parallel.mesh import Mesh
from verl.parallel.register import Dispatch, Execute, Registered, register, registered
from verl.roles.objectives.policy import rows_with_advantage
from verl.roles.updates import MiniBatchSchedule, Updates

meshes = st.sampled_from(
    [
        Mesh.flat(range(1)),
        Mesh.flat(range(3)),
        Mesh.of(4, tensor_parallel=2),
        Mesh.of(8, fsdp_size=2, sequence_parallel=2),
    ]
)
rows = st.integers(1, 13)
FLAT2 = Shape(Mesh.flat(range(2)))


def run(mode, shape, method, *args, **kwargs):
    """The call of a method on all ranks, as by a runtime, in a loop."""
    plan = plan_call(Registered(mode), shape, args, kwargs)
    results = {i: method(*plan.calls[i][0], **plan.calls[i][1]) for i in plan.ranks()}
    return plan, plan.collect([results[i] for i in plan.answering])


def echo(batch, *args):
    return DataProto.from_dict({"row": batch.batch["row"]}, {"note": batch.non_tensor_batch["note"]})


def twice(batch, *args):
    """Two result rows for each row."""
    return DataProto.from_dict({"row": batch.batch["row"].repeat_interleave(2)})


@settings(max_examples=60, deadline=None)
@given(mesh=meshes, num_rows=rows, n=st.integers(1, 4), seed=st.integers(0, 5))
@pytest.mark.parametrize("mode", [Dispatch.ND_COMPUTE_PROTO, Dispatch.ND_SCATTER_PROTO])
def test_rows_come_back_in_order(mode, mesh, num_rows, n, seed):
    batch = make_batch(num_rows, n, seed)
    plan, joined = run(mode, Shape(mesh), echo, batch)
    assert rows_of(joined) == list(range(num_rows))
    assert joined.non_tensor_batch["note"].tolist() == [{"row": i} for i in range(num_rows)]
    assert plan.ranks() == list(range(mesh.size))
    for index in range(mesh.size):
        same = plan.calls[mesh.collectors()[mesh.dp_rank(index)]]
        assert plan.calls[index] is same, "ranks of a model-parallel group get one object"


@settings(max_examples=30, deadline=None)
@given(mesh=meshes, num_rows=rows, seed=st.integers(0, 3))
def test_several_result_rows_per_row(mesh, num_rows, seed):
    _, joined = run(Dispatch.ND_SCATTER_PROTO, Shape(mesh), twice, make_batch(num_rows, seed=seed))
    assert rows_of(joined) == [i for i in range(num_rows) for _ in range(2)]


def test_no_rank_of_a_sharded_model_is_left_without_a_row():
    batch = make_batch(2)
    plan, joined = run(Dispatch.ND_COMPUTE_PROTO, Shape(Mesh.flat(range(4))), echo, batch)
    assert [len(call[0][0]) for call in plan.calls] == [1, 1, 1, 1]
    assert rows_of(joined) == [0, 1]


@settings(max_examples=30, deadline=None)
@given(mesh=meshes, num_rows=rows, seed=st.integers(0, 3))
def test_what_is_expected_is_shared_out(mesh, num_rows, seed):
    """With prompts, which have two results each; either batch may be empty."""
    batch = make_batch(num_rows, seed=seed)
    expected = np.random.default_rng(seed).integers(1, 100, size=num_rows).astype(np.float32)
    batch.batch["expected_tokens"] = torch.from_numpy(expected)
    prompts = make_batch(3 * seed, seed=seed)
    plan, joined = run(Dispatch.ND_ADVANCE_PROTO, Shape(mesh), lambda a, b: (twice(a), b), prompts, batch)
    assert rows_of(joined[0]) == [i for i in range(3 * seed) for _ in range(2)]
    assert rows_of(joined[1]) == list(range(num_rows))
    calls = [plan.calls[mesh.collectors()[part]][0] for part in range(mesh.dp_size)]
    sums = [sum(rows.batch["expected_tokens"].tolist()) for _, rows in calls]
    assert max(sums) - min(sums) <= max(expected, default=0)
    divided, nothing = run(Dispatch.ND_ADVANCE_PROTO, Shape(mesh), lambda *call: call, batch, DataProto())[1]
    assert (rows_of(divided), len(nothing)) == (list(range(num_rows)), 0)
    batch.batch["kv_rank"] = owner = torch.arange(num_rows) % mesh.dp_size
    plan, joined = run(Dispatch.ND_ADVANCE_PROTO, Shape(mesh), lambda *call: call, prompts, batch)
    calls = [plan.calls[mesh.collectors()[part]][0][1] for part in range(mesh.dp_size)]
    assert [rows_of(rows) for rows in calls] == [np.flatnonzero(owner == part).tolist() for part in range(mesh.dp_size)]
    assert rows_of(joined[1]) == list(range(num_rows))


def test_rows_go_to_their_owner():
    batch = make_batch(9, seed=2)
    owner = batch.batch["rollout_rank"].tolist()
    plan, joined = run(Dispatch.ND_OWNER_PROTO, FLAT2, echo, batch)
    assert rows_of(joined) == list(range(9))
    for rank in range(2):
        assert rows_of(plan.calls[rank][0][0]) == [i for i, o in enumerate(owner) if o == rank]
    elsewhere = Shape(Mesh.flat(range(3)), beside_rollout=False)
    assert rows_of(run(Dispatch.ND_OWNER_PROTO, elsewhere, echo, batch)[1]) == list(range(9))
    batch.batch["rollout_rank"][0] = 7  # which has left the group
    assert rows_of(run(Dispatch.ND_OWNER_PROTO, FLAT2, echo, batch)[1]) == list(range(9))


def test_object_columns_that_no_one_asks_for_stay():
    declared = Registered(Dispatch.ND_COMPUTE_PROTO, objects=("uid",))
    plan = plan_call(declared, FLAT2, (make_batch(4),), {})
    assert set(plan.calls[0][0][0].non_tensor_batch) == {"uid"}


@settings(max_examples=40, deadline=None)
@given(
    mesh=meshes,
    num_rows=rows,
    size=st.integers(1, 8),
    epochs=st.integers(1, 2),
    shuffle=st.booleans(),
    n=st.integers(1, 3),
)
def test_mini_batches_match_one_process(mesh, num_rows, size, epochs, shuffle, n):
    schedule = MiniBatchSchedule(size, epochs, shuffle, seed=3)
    batch = make_batch(num_rows, n)
    plan = plan_call(Registered(Dispatch.ND_MINI_BATCHES), Shape(mesh, schedule=schedule), (batch, 5), {})
    expected = [sorted(part.tolist()) for part in schedule.rows(batch, 5)]
    union = [[] for _ in expected]
    for index in mesh.collectors():
        (share, step), kwargs = plan.calls[index]
        assert step == 5
        assert len(kwargs["mini_batches"]) == len(expected)
        for number, positions in enumerate(kwargs["mini_batches"]):
            union[number] += [rows_of(share)[p] for p in positions]
    assert [sorted(part) for part in union] == expected


def test_updates_merge_to_the_figures_of_the_mini_batch():
    def part(loss, tokens, observed):
        everywhere = {"loss": Metric.sum(loss), "clipped": Metric.mean(loss, tokens), "grad_norm": Metric.last(2.0)}
        at_the_end = {"clipped": Metric.mean(math.nan, 0), "ratio": Metric.max(loss), "num_skipped": Metric.last(1.0)}
        steps = [{**everywhere, "ratio": Metric.max(-9.0), "num_skipped": Metric.last(1.0)}, everywhere | at_the_end]
        return Updates("actor", steps, 0.1, [torch.tensor(observed), torch.tensor(observed)])

    merged = part(1.0, 1, [0.5]).merge([part(3.0, 3, [0.25, 0.125])])
    figures = metric_values(merged.metrics())
    assert figures["actor/loss"] == 4.0
    assert figures["actor/clipped"] == 2.5  # nothing trains in the second mini-batch
    assert (figures["actor/ratio"], figures["actor/num_skipped"]) == (3.0, 2.0)
    assert figures["actor/grad_norm"] == 2.0
    assert figures["actor/lr"] == 0.1
    assert merged.observed[0].tolist() == [0.5, 0.25, 0.125]


class TestPlainModes:
    def test_one_to_all(self):
        assert run(Dispatch.ONE_TO_ALL, FLAT2, lambda x: x + 1, 1)[1] == [2, 2]

    def test_all_reduce(self):
        assert run(Dispatch.ALL_REDUCE, FLAT2, lambda: 3)[1] == 6
        merged = run(Dispatch.ALL_REDUCE, FLAT2, lambda: {"a": Metric.sum(2.0), "b": Metric.max(1.0)})[1]
        assert metric_values(merged) == {"a": 4.0, "b": 1.0}

    def test_execution_on_the_first_rank(self):
        alone = Registered(Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
        assert plan_call(alone, FLAT2, (), {}).ranks() == [0]

    def test_a_declared_method_is_still_a_method(self):
        class Plain:
            @register(dispatch_mode=Dispatch.ND_COMPUTE_PROTO, blocking=False)
            def work(self, batch):
                """Doc."""
                return len(batch)

        assert Plain().work(make_batch(3)) == 3
        assert Plain.work.__doc__ == "Doc."
        assert registered(Plain)["work"].blocking is False


class TestShares:
    def test_contiguous(self):
        assert contiguous_shares(5, 3) == [[0, 1], [2, 3], [4]]
        assert contiguous_shares(1, 3) == [[0], [], []]

    @settings(max_examples=40, deadline=None)
    @given(num_rows=rows, parts=st.integers(1, 5), n=st.integers(1, 4), seed=st.integers(0, 4))
    def test_every_row_once(self, num_rows, parts, n, seed):
        shares = balanced_shares(make_batch(num_rows, n, seed), parts, TokenCost(96))
        assert sorted(row for share in shares for row in share) == list(range(num_rows))
        assert len(shares) == parts
        assert all(map(len, shares)) or num_rows < parts

    @settings(max_examples=40, deadline=None)
    @given(num_rows=rows, parts=st.integers(1, 5), n=st.integers(1, 4), seed=st.integers(0, 4), data=st.data())
    def test_a_unit_is_on_one_rank(self, num_rows, parts, n, seed, data):
        batch = make_batch(num_rows, n, seed)
        units = data.draw(st.lists(st.integers(0, 5), min_size=num_rows, max_size=num_rows))
        batch.batch["pair"] = torch.tensor(units, dtype=torch.int64)
        shares = balanced_shares(batch, parts, TokenCost(96), unit="pair")
        assert sorted(row for share in shares for row in share) == list(range(num_rows))
        assert len(shares) == parts
        owners = [{units[row] for row in share} for share in shares]
        assert sum(map(len, owners)) == len(set(units))
        assert all(map(len, shares)) or len(set(units)) < parts

    def test_a_unit_needs_its_column(self):
        with pytest.raises(DataError, match="no column 'pair'"):
            balanced_shares(make_batch(4), 2, TokenCost(96), unit="pair")

    def test_samples_of_a_prompt_stay_together_when_that_is_as_even(self):
        batch = make_batch(8, n=4)
        batch.batch["attention_mask"][:] = True
        batch.batch["prompt_mask"][:] = True
        assert list(map(list, balanced_shares(batch, 2, TokenCost(96)))) == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert [len(share) for share in balanced_shares(batch.slice(0, 4), 2, TokenCost(96))] == [2, 2]

    def test_rows_that_are_not_computed_cost_nothing(self):
        batch = make_batch(64, n=4)
        batch.batch["attention_mask"][:] = True
        batch.batch["prompt_mask"][:] = True
        computed = range(16)  # the rows of four prompts
        shares = balanced_shares(batch, 4, TokenCost(96), computed=computed)
        assert sorted(row for share in shares for row in share) == list(range(64))
        assert [[row for row in share if row in computed] for share in shares] == [
            list(range(start, start + 4)) for start in (0, 4, 8, 12)
        ]

    def test_rows_stay_where_they_were_sampled_unless_that_is_far_from_even(self):
        batch = make_batch(64, n=4, seed=1)
        lengths, home = batch.batch["attention_mask"].sum(dim=1).numpy(), np.arange(64) % 2
        for heavy, stays in ((1, True), (12, False)):
            batch.batch["attention_mask"][:] = torch.arange(20) >= 20 - torch.from_numpy(lengths)[:, None].clamp(
                max=heavy * 20
            )
            rows = np.flatnonzero(home == 0) if heavy == 12 else np.arange(64)
            shares = balanced_shares(batch, 2, TokenCost(24), rows, home=home)
            assert all((home[share] == part).all() for part, share in enumerate(shares)) == stays
            assert sorted(np.concatenate(shares)) == rows.tolist()

    def test_cost_is_even(self):
        batch, cost = make_batch(64, n=4, seed=1), TokenCost(24)
        shares = balanced_shares(batch, 4, cost)
        lengths = batch.batch["attention_mask"].sum(dim=1)
        sums = [float(lengths[share].sum()) for share in shares]
        assert max(sums) / min(sums) < 1.2


def test_join_of_other_results():
    assert join_rows([1, "a"], [[0], [1]]) == [1, "a"]
    merged = join_rows([{"x": Metric.sum(1.0)}, {"x": Metric.sum(2.0)}], [[0], [1]])
    assert merged["x"].value == 3.0
    empty = DataProto.from_dict({"row": torch.zeros(0, dtype=torch.int64)})
    assert len(join_rows([empty, empty], [[], []])) == 0


class TestComputedRows:
    """The rows of a mini-batch that a schedule has computed."""

    def batch(self, advantages, mask):
        batch = make_batch(len(advantages))
        batch.batch["advantages"], batch.batch["response_mask"] = torch.tensor(advantages), torch.tensor(mask)
        return batch

    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(
            st.lists(
                st.tuples(st.sampled_from([0.0, -0.0, 1e-30, -2.0, math.nan]), st.booleans()), min_size=3, max_size=3
            ),
            min_size=1,
            max_size=6,
        )
    )
    def test_those_with_an_advantage_on_a_response_token(self, rows):
        batch = self.batch([[a for a, _ in row] for row in rows], [[m for _, m in row] for row in rows])
        needed = [i for i, row in enumerate(rows) if any(m and a != 0 for a, m in row)]
        computed = MiniBatchSchedule(8, needed=rows_with_advantage).computed(batch)
        assert computed == needed or (not needed and len(computed) == 1)
        assert MiniBatchSchedule(8, 1, False, 0).computed(batch) == range(len(rows))

    def test_the_shortest_one_with_a_response_where_all_advantages_are_zero(self):
        batch = self.batch([[0.0, 0.0]] * 3, [[True, True], [True, False], [False, False]])
        batch.batch["attention_mask"] = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]])
        assert MiniBatchSchedule(8, needed=rows_with_advantage).computed(batch) == [1]

    def test_an_empty_share_has_none(self):
        empty = self.batch([[0.0]], [[True]]).slice(0, 0)
        assert MiniBatchSchedule(8, needed=rows_with_advantage).computed(empty) == []


@pytest.mark.parametrize("shuffle", [False, True])
def test_training_calls_keep_units_on_one_rank(shuffle):
    batch = make_batch(12)
    batch.batch["pair"] = torch.arange(12) // 2
    schedule = MiniBatchSchedule(6, 1, shuffle, seed=3, unit="pair")
    shape = Shape(Mesh.flat(range(2)), schedule=schedule)
    plan = plan_call(Registered(Dispatch.ND_MINI_BATCHES), shape, (batch, 0), {})
    for share in map(list, plan.rows):
        assert share == [row for row in range(12) if row // 2 in {r // 2 for r in share}]


def test_pairs_stay_together_where_parting_them_would_balance_the_ranks():
    """A pair of one long and one short row: a rank each would be the better balance, in each mini-batch of a shuffled pass."""
    batch = make_batch(8)
    batch.batch["pair"] = torch.arange(8) // 2
    batch.batch["attention_mask"] = torch.arange(40).expand(8, 40) < torch.tensor([[40], [2]] * 4)
    batch.batch["prompt_mask"] = torch.zeros(8, 2, dtype=torch.bool)
    apart = balanced_shares(batch, 2, TokenCost(96), [0, 1])
    assert [len(share) for share in apart] == [1, 1]
    schedule = MiniBatchSchedule(2, 2, True, seed=1, unit="pair")
    plan = plan_call(
        Registered(Dispatch.ND_MINI_BATCHES), Shape(Mesh.flat(range(2)), schedule=schedule), (batch, 0), {}
    )
    minis = zip(*(kwargs["mini_batches"] for _, kwargs in plan.calls), strict=True)
    for minis_of_rank in minis:
        assert sorted(map(len, minis_of_rank)) == [0, 2]
    assert len(schedule.rows(batch, 0)) == 8


@given(
    units=st.lists(st.integers(0, 4), max_size=12),
    size=st.integers(1, 8),
    epochs=st.integers(1, 2),
    shuffle=st.booleans(),
)
def test_mini_batches_never_cut_a_unit(units, size, epochs, shuffle):
    batch = DataProto.from_dict({"pair": torch.tensor(units, dtype=torch.int64)})
    mini_batches = MiniBatchSchedule(size, epochs, shuffle, unit="pair").rows(batch, 3)
    assert sorted(row for mini in mini_batches for row in mini) == sorted(list(range(len(units))) * epochs)
    for mini in mini_batches:
        inside = {units[row] for row in mini}
        assert all((units[row] in inside) == (row in mini) for row in range(len(units)))
        assert len(mini) <= size or len(inside) == 1


def test_schedule_is_a_function_of_step_and_pass():
    schedule = MiniBatchSchedule(3, 2, True, 11)
    batch = make_batch(7)
    first, again, later = schedule.rows(batch, 1), schedule.rows(batch, 1), schedule.rows(batch, 2)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(first, later, strict=True))
    assert [len(part) for part in first] == [3, 3, 1, 3, 3, 1]
