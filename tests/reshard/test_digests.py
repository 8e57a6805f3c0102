"""What the digests of tensors that travelled tell apart."""

import pytest
import torch

from verl.reshard.plan import Move
from verl.reshard.transport import _digest

BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
MOVE = Move("weight", 0, 1, ((0, 5),), 10)


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("size", [1, 3, 8, 101, 140_001])
def test_any_difference_counts(dtype, size):
    numbers = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    bits, of = BITS[dtype], _digest(MOVE, numbers)
    assert _digest(MOVE, numbers.clone()) == of
    others = [-numbers, (~numbers.view(bits)).view(dtype), numbers.roll(1) if size > 1 else numbers + 1]
    for index in (0, size // 2, size - 1):
        for bit in (0, 8 * dtype.itemsize - 1):
            flipped = numbers.clone()
            flipped.view(bits)[index] ^= torch.tensor(1, dtype=bits) << bit
            others.append(flipped)
    if size > 4:  # the signs of two elements, words apart
        flipped = numbers.clone()
        flipped[[0, 4]] *= -1
        others.append(flipped)
    assert of not in {_digest(MOVE, other) for other in others}


def test_name_place_and_format_count():
    numbers = torch.zeros(4)
    others = [MOVE._replace(tensor="bias"), MOVE._replace(box=((1, 6),))]
    assert _digest(MOVE, numbers) not in {_digest(move, numbers) for move in others}
    assert _digest(MOVE, numbers) != _digest(MOVE, numbers.view(torch.int32))


@pytest.mark.parametrize("first", [0, 1, 3])
def test_where_it_lies_in_memory_does_not_count(first):
    numbers = torch.randn(100, 7).to(torch.bfloat16)
    part = numbers.flatten()[first : first + 600]
    columns = numbers[:, first : first + 2]
    assert _digest(MOVE, part) == _digest(MOVE, part.clone())
    assert _digest(MOVE, columns) == _digest(MOVE, columns.contiguous())
    assert _digest(MOVE, torch.empty(0)) == _digest(MOVE, torch.empty(0, 3))
