"""Differences between tensors that the digests of a weight sync detect."""

import pytest
import torch

from verl.reshard import digest as digests
from verl.reshard.digest import copy_with_digest, digest, spread_with_digest

BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}


@pytest.fixture(params=["host", "device"])
def device(request, monkeypatch):
    """Digests as they are taken of numbers in the memory of the host, and of a GPU."""
    if request.param == "device":
        monkeypatch.setattr(digests, "_is_on_host", lambda numbers: False)
        monkeypatch.setattr(digests, "_DEVICE_BYTES", 1 << 18)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("size", [1, 3, 8, 101, 140_001])
def test_any_difference_counts(dtype, size):
    numbers = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    bits, of = BITS[dtype], digest("weight", numbers)
    assert digest("weight", numbers.clone()) == of
    changed = [-numbers, (~numbers.view(bits)).view(dtype), numbers.roll(1) if size > 1 else numbers + 1]
    for index in (0, size // 2, size - 1):
        for bit in (0, 8 * dtype.itemsize - 1):
            flipped = numbers.clone()
            flipped.view(bits)[index] ^= torch.tensor(1, dtype=bits) << bit
            changed.append(flipped)
    if size > 4:  # the signs of two elements, words apart
        flipped = numbers.clone()
        flipped[[0, 4]] *= -1
        changed.append(flipped)
    assert of not in {digest("weight", other) for other in changed}


def test_label_and_format_count():
    numbers = torch.zeros(4)
    assert digest("weight", numbers) != digest("bias", numbers)
    assert digest("weight", numbers) != digest("weight", numbers.view(torch.int32))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("first", [0, 1, 3])
def test_where_it_lies_in_memory_does_not_count(first):
    numbers = torch.randn(100, 7).to(torch.bfloat16)
    part = numbers.flatten()[first : first + 600]
    columns = numbers[:, first : first + 2]
    assert digest("weight", part) == digest("weight", part.clone())
    assert digest("weight", columns) == digest("weight", columns.contiguous())
    assert digest("weight", torch.empty(0)) == digest("weight", torch.empty(0, 3))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("shape", [(300, 700), (3, 5), (2, 3, 8), (200_001,), (2, 140_000), (7, 0), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_what_is_copied(shape, dtype):
    """Into a part of a larger tensor, with a cast, in chunks."""
    source = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    larger = torch.full((*shape[:-1], shape[-1] + 8) if shape else (), torch.nan, dtype=dtype)
    target = larger[..., : shape[-1]] if shape else larger
    said = copy_with_digest("weight", target, source)
    assert torch.equal(target, source.to(dtype))
    assert said == digest("weight", target) == digest("weight", source.to(dtype))
    assert larger.isnan().sum() == larger.numel() - target.numel()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("shape", [(300, 700), (3, 5), (2, 3, 8), (20_001,), (7, 0), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("portion_bytes", [100, 1 << 20])
def test_of_what_goes_to_several_places(shape, dtype, portion_bytes):
    """However much is cast at a time; also into places of another format."""
    source = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    targets = [torch.full(shape, torch.nan, dtype=d) for d in (dtype, dtype, torch.float64)]
    said = spread_with_digest("weight", targets, source, dtype, portion_bytes)
    assert said == digest("weight", source.to(dtype)) == digest("weight", targets[1])
    assert all(torch.equal(target, source.to(dtype).to(target.dtype)) for target in targets)


@pytest.mark.usefixtures("device")
def test_rows_that_are_swapped_count():
    numbers = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    of = digest("weight", numbers)
    assert of not in (
        digest("weight", numbers.flip(0)),
        digest("weight", numbers.roll(1, 0)),
        digest("weight", numbers.roll(4, 1)),
    )
