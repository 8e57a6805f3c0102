"""Dithered rounding of masters: the formula, its expectation, and that no division of a tensor changes it."""

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.models import rounding
from verl.models.rounding import TILE_LENGTHS, Region, Rounding, offsets

DITHERED = Rounding()
BF16, LARGEST = torch.bfloat16, torch.finfo(torch.bfloat16).max


def rounded(name, master):
    return DITHERED.rounded(name, master, BF16)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def bits(tensor):
    return tensor.view(torch.int16)


def steps_of_bfloat16(values):
    """The distance from each value's magnitude rounded down to the next bfloat16."""
    low = (values.view(torch.int32) & -(1 << 16)).view(torch.float32)
    return ((low.view(torch.int32) + (1 << 16)).view(torch.float32) - low).abs()


def test_the_offset_is_added_to_the_bits_and_the_lower_half_is_cut_off():
    master = normal(37, 576)
    expected = (master.view(torch.int32) + offsets("a", (37, 576))) & -(1 << 16)
    assert torch.equal(rounded("a", master).float().view(torch.int32), expected)


def test_the_offsets_match_every_run():
    """Checkpoints of one version are exported and resumed by another."""
    shifts = offsets("model.layers.0.mlp.up_proj.weight", (3, 40_000))
    assert int(shifts.min()) >= 0
    assert int(shifts.max()) < 1 << 16
    assert shifts[0, :4].tolist() == FIRST
    assert hashlib.sha256(shifts.numpy().tobytes()).hexdigest()[:16] == DIGEST


FIRST, DIGEST = [29868, 60632, 37400, 14987], "0585e62fe9c43b16"


def test_offsets_are_uniform_and_the_tiles_lengths_are_prime():
    counts = torch.bincount(offsets("w", (1 << 22,)) >> 8, minlength=256)
    assert len(counts) == 256
    assert (counts / (1 << 14) - 1).abs().max() < 0.05
    for length in TILE_LENGTHS:
        assert all(length % divisor for divisor in range(2, 257))


def test_compiled_and_torch_give_the_same_bits(monkeypatch):
    assert rounding._compiled() is not None, "verl.models._rounding was not compiled; run `make venv`"
    master = normal(300, 4_001)
    master[::7, 5] = torch.tensor(float("nan"))
    master[1, :4] = torch.tensor([float("inf"), -float("inf"), 3.4e38, -3.4e38])
    regions = [Region((300, 4_001), (0, 0)), Region((600, 9_000), (17, 4_000)), Region((2, 700, 4_001), (1, 30, 0))]
    shards = [master, master, master[None]]
    compiled = [DITHERED.rounded("w", s, BF16, region) for s, region in zip(shards, regions, strict=True)]
    monkeypatch.setattr(rounding, "_compiled", lambda: None)
    for shard, region, part in zip(shards, regions, compiled, strict=True):
        assert torch.equal(bits(DITHERED.rounded("w", shard, BF16, region)), bits(part))


def test_values_on_the_grid_never_move():
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(BF16)
    every = every[~every.isnan()]
    for name in "abc":
        assert torch.equal(bits(rounded(name, every.float())), bits(every))


def test_an_element_stays_until_its_master_has_crossed_its_own_threshold():
    """Between two bfloat16 values a weight changes once, at the distance of its offset."""
    low = torch.full((1 << 10,), 0.0157470703125)  # on the grid
    step = steps_of_bfloat16(low)
    up = torch.stack([rounded("w", low + step * (k / 64)).float() > low for k in range(65)])
    assert not up[0].any()
    assert up[64].all()
    assert torch.equal(up.long().diff(dim=0).abs().sum(0), torch.ones(1 << 10, dtype=torch.long))


@pytest.mark.parametrize("shape", [(1000, 576), (700, 1024), (300, 4096), (2000, 192), (300, 11_008), (400, 8192)])
def test_updates_below_half_a_step_show_on_the_whole_and_in_each_row_and_column(shape):
    """Masters move by a quarter of a bfloat16 step. Rounding to nearest shows none of it, dithering all of it. A row or
    column of n elements shows a sum of n coins of probability 1/4; it deviates as with independent offsets."""
    start = normal(*shape).to(BF16).float()
    step, share = steps_of_bfloat16(start), 0.25
    master = start + step * share * start.sign()
    assert torch.equal(master.to(BF16).float(), start)
    steps = (rounded("w", master).float() - start) / step * start.sign()
    assert set(steps.unique().tolist()) == {0.0, 1.0}
    coin = (share * (1 - share)) ** 0.5
    for dim in (0, 1):
        deviation = (steps.mean(dim) - share) / (
            coin / shape[dim] ** 0.5
        )  # in standard deviations of independent coins
        assert deviation.abs().max() < 5.5
        assert 0.85 < deviation.std() < 1.15
    assert abs(steps.mean() - share) < 4 * coin / steps.numel() ** 0.5


@pytest.mark.parametrize("shape", [(9, 65_536), (65_536, 9), (1 << 20,), (5, 131_074), (40, 30, 576)])
def test_updates_show_in_tensors_of_awkward_shapes(shape):
    start = normal(*shape).to(BF16).float()
    step = steps_of_bfloat16(start) * start.sign()
    steps = (rounded("w", start + step / 50).float() - start) / step
    assert abs(steps.mean() * 50 - 1) < 0.1


def test_the_error_of_a_product_fits_independent_offsets():
    """W x over rows; neighbours in the tile may lie in other rows: errors add up as independent ones do."""
    master, x = normal(1536, 576, seed=1), torch.randn(576, 64, generator=torch.Generator().manual_seed(2))
    u = torch.randint(0, 1 << 16, master.shape, generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    independent = ((master.view(torch.int32) + u) & -(1 << 16)).view(torch.float32)
    errors = [((w - master) @ x).double() for w in (rounded("w", master).float(), independent)]
    ours, theirs = (error.std() for error in errors)
    assert 0.97 < ours / theirs < 1.03
    assert errors[0].mean().abs() < 4 * theirs / errors[0].numel() ** 0.5
    assert 0.9 < (errors[0].T @ errors[0]).diag().std() / (errors[1].T @ errors[1]).diag().std() < 1.5


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_every_part_is_rounded_as_the_whole_is(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4)))
    first = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    stop = tuple(data.draw(st.integers(f, size)) for f, size in zip(first, shape, strict=True))
    index = tuple(slice(f, s) for f, s in zip(first, stop, strict=True))
    master = normal(*shape, seed=data.draw(st.integers(0, 9)))
    full, part = rounded("w", master), DITHERED.rounded("w", master[index], BF16, Region(shape, first))
    assert torch.equal(bits(part), bits(full[index].contiguous()))


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_chunks_end_anywhere(data):
    """Chunks far smaller than rows, rows far smaller than chunks, and strided targets; compiled and in torch."""
    shape = (data.draw(st.integers(1, 30)), data.draw(st.integers(1, 50)))
    first = data.draw(st.integers(0, shape[1] - 1))
    master = normal(*shape)
    expected = ((master.view(torch.int32) + offsets("w", shape)) & -(1 << 16)).view(torch.float32).to(BF16)
    target = torch.zeros(shape[1], shape[0], dtype=BF16).t()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounding, "_CHUNK", data.draw(st.integers(1, 100)))
        if data.draw(st.booleans()):
            patch.setattr(rounding, "_compiled", lambda: None)
        DITHERED.write(target, "w", master)
        part = DITHERED.rounded("w", master[:, first:], BF16, Region(shape, (0, first)))
    assert torch.equal(target, expected)
    assert torch.equal(part, expected[:, first:])


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (1, 1)])
def test_shapes_of_nothing_and_of_one_element(shape):
    master = torch.full(shape, 0.1)
    assert rounded("w", master).shape == torch.Size(shape)
    assert (rounded("w", master).float() - master).abs().sum() <= 0.1 * 2**-7


def test_extremes_stay_what_they_are():
    """A finite master never becomes infinite, an infinite one or a NaN never finite, whatever the offset."""
    inf, nan = float("inf"), float("nan")
    all_ones = torch.tensor([-1, 0x7FFFFFFF, 0x7F800001, -8388607], dtype=torch.int32).view(torch.float32)  # all NaN
    extremes = torch.cat([torch.tensor([inf, -inf, nan, 3.4028e38, -3.4028e38, LARGEST, -LARGEST]), all_ones])
    near = torch.tensor([LARGEST, -LARGEST]).view(torch.int32).sub(1).view(torch.float32)
    kinds = torch.cat([extremes, near]).repeat(1000)
    actual, expected = rounded("w", kinds).float(), kinds.clamp(-LARGEST, LARGEST)
    assert torch.equal(actual.isnan(), kinds.isnan())
    assert torch.equal(actual.isinf(), kinds.isinf())
    finite = kinds.isfinite()
    assert (actual[finite].abs() <= LARGEST).all()
    assert torch.equal(actual[finite & (kinds.abs() >= LARGEST)], expected[finite & (kinds.abs() >= LARGEST)])
    assert torch.equal(actual.signbit()[finite], kinds.signbit()[finite])


def test_the_rest_of_a_chunk_with_an_infinity_is_rounded_as_ever():
    master = normal(500)
    broken = master.clone()
    broken[7] = float("inf")
    same = torch.arange(500) != 7
    assert torch.equal(rounded("w", master)[same], rounded("w", broken)[same])


def test_zeros_and_denormals():
    smallest = torch.tensor([1, 1 << 15, (1 << 16) - 1], dtype=torch.int32).view(torch.float32)
    for sign in (1.0, -1.0):
        values = rounded("w", (sign * smallest).repeat(3000)).float()
        assert set(values.abs().unique().tolist()) == {0.0, 2.0**-133}
        assert bool((values.signbit() == (sign < 0)).all())
    zeros = torch.tensor([0.0, -0.0]).repeat(50)
    assert torch.equal(bits(rounded("w", zeros)), bits(zeros.to(BF16)))


def test_magnitudes_are_rounded_alike_for_both_signs():
    master = normal(4000)
    assert torch.equal(rounded("w", -master), -rounded("w", master))


def test_other_dtypes_and_nearest_are_casts():
    master = normal(100, 3)
    for dtype in (torch.float32, torch.float64, torch.float16):
        assert torch.equal(DITHERED.rounded("w", master, dtype), master.to(dtype))
    assert torch.equal(DITHERED.rounded("w", master.double(), BF16), master.double().to(BF16))
    assert torch.equal(Rounding("nearest").rounded("w", master, BF16), master.to(BF16))
    assert not torch.equal(rounded("w", master), master.to(BF16))


def test_parameters_have_offsets_of_their_own():
    a, b = (offsets(name, (500,)) for name in ("layers.0.weight", "layers.1.weight"))
    assert (a == b).float().mean() < 0.02


def test_written_weights_count_up_their_version():
    """Copies of the weights and recorded activations go by it."""
    weights = torch.zeros(3, 40, dtype=torch.bfloat16)
    Rounding().write(weights, "w", torch.randn(3, 40))
    assert weights._version > 0
