"""Plans cut into buckets."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reshard.test_layout import points
from tests.reshard.test_plan import problems
from verl.parallel.slices import cut, numel
from verl.reshard.plan import Move, buckets, make_plan

sizes = st.lists(st.integers(1, 5), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(1, 40))
def test_cuts_of_a_slice(shape, most):
    whole = tuple((3, 3 + size) for size in shape)
    parts = cut(whole, most)
    assert all(numel(part) <= most for part in parts)
    assert points(parts) == points([whole])


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(2, 200))
def test_no_rank_has_more_than_its_bound(problem, most):
    plan = make_plan(*problem)
    groups = buckets(plan.moves, most)
    for bucket in groups:
        for rank in {r for move in bucket for r in (move.source, move.destination)}:
            assert sum(m.num_bytes for m in bucket if rank in (m.source, m.destination)) <= most
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
