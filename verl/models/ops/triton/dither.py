"""Dithered rounding of float32 masters by Triton, in one pass over memory; verl.models.rounding has the rule."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from verl.models.rounding import TILE_LENGTHS, Region, chunks, tiles

_CHUNK = 1 << 30  # positions, countable by int32
_BLOCK = 2048


def launch_dither(
    master: torch.Tensor, target: torch.Tensor, phase: int, shape: Sequence[int], first: Sequence[int]
) -> None:
    """See verl.models.rounding."""
    bits, out = master.view(-1).view(torch.int32), target.view(-1).view(torch.int16)
    a, b = tiles(master.device, 0)
    region = Region(tuple(shape), tuple(first))
    for at, rows, columns, start, stride in chunks(tuple(master.shape), region, _CHUNK):
        count = rows * columns
        in_a, in_b = ((start + phase) % length for length in TILE_LENGTHS)
        _kernel[(triton.cdiv(count, _BLOCK),)](
            bits[at:], out[at:], a, b, count, columns, stride, in_a, in_b, *TILE_LENGTHS, BLOCK=_BLOCK, num_warps=4
        )


@triton.jit(do_not_specialize=["count", "in_a", "in_b"])
def _kernel(
    bits, out, a, b, count, columns, stride, in_a, in_b, LENGTH_A: tl.constexpr, LENGTH_B: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = at // columns
    position = row * stride + (at - row * columns)
    one = tl.load(a + (position + in_a) % LENGTH_A, mask=inside, other=0)
    other = tl.load(b + (position + in_b) % LENGTH_B, mask=inside, other=0)
    master = tl.load(bits + at, mask=inside, other=0)
    rounded = (master + (one ^ other)) >> 16
    size = master & 0x7FFFFFFF
    # the largest bfloat16 with the sign; infinities stay, and all NaN become one
    largest = tl.where(size == 0x7F800000, master >> 16, tl.where(master < 0, -129, 0x7F7F))
    extreme = tl.where(size > 0x7F800000, 0x7FC0, largest)
    tl.store(out + at, tl.where(size >= 0x7F7F0000, extreme, rounded).to(tl.int16), mask=inside)
