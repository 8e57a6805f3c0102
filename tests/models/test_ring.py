"""Ring attention against one device, in float64: any layout, heads, padding and number of ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engines.ranks import results_once
from tests.models import ring_checks
from verl.models.parallel.sequence import num_head_ranks


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_it_equals_one_device(tmp_path_factory, worker_id, num_ranks):
    results = results_once(ring_checks.__name__, num_ranks, tmp_path_factory, worker_id)
    assert results["check_ring"]["gap"] < 1e-10
    assert results["check_ring"]["rings"] == {2: [1, 2], 4: [1, 2, 4]}[num_ranks]


@pytest.mark.slow
def test_a_block_travels_as_far_as_it_is_seen(tmp_path_factory, worker_id):
    """One row on four ranks: 3 + 2 + 1 hops in each pass, and as many returns. Two short rows cross a border."""
    results = results_once(ring_checks.__name__, 4, tmp_path_factory, worker_id)
    assert results["check_hops"] == {"long": 3 * 6, "short": 3 * 2}


@given(heads=st.integers(1, 64), groups=st.integers(1, 8), size=st.integers(1, 64))
def test_the_most_ranks_divide_the_heads(heads, groups, size):
    kv_heads, heads = heads, heads * groups
    ranks = num_head_ranks(heads, kv_heads, size)
    assert size % ranks == 0
    assert heads % ranks == 0
    more = [n for n in range(ranks + 1, size + 1) if size % n == 0 and heads % n == 0]
    assert all(kv_heads % n and n % kv_heads for n in more)
