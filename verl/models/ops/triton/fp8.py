"""Rows in fp8 (e4m3) with their scales, by Triton: one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from verl.models.ops.triton.overlap import overlap, wait

_MOST_BLOCK = 8192  # columns that a program reads at once
_LAST = tl.constexpr(448.0)  # the largest number of e4m3
_TINY = tl.constexpr(1.17549435e-38)  # the smallest normal number of float32


def launch_fp8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See verl.models.ops.low_precision."""
    x = x.contiguous()
    rows, columns = x.shape
    level, scale = torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty(rows, 1, dtype=torch.float32)
    block = min(triton.next_power_of_2(columns), _MOST_BLOCK)
    if x.numel():
        _rows_kernel[(rows,)](
            x, level, scale, columns, BLOCK=block, num_warps=min(max(block // 512, 1), 16), **overlap(x)
        )
    return level, scale


@triton.jit
def _rows_kernel(x, level, scale, columns, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    start = row * columns
    wait(OVERLAPS)
    magnitudes = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, columns, BLOCK):
        values = tl.load(x + start + first + at, mask=first + at < columns, other=0.0).to(tl.float32)
        magnitudes = tl.maximum(magnitudes, tl.abs(values), propagate_nan=tl.PropagateNan.ALL)
    largest = tl.max(magnitudes, axis=0)
    largest = tl.where(tl.sum((magnitudes != magnitudes).to(tl.int32), axis=0) > 0, float("nan"), largest)
    row_scale = tl.div_rn(largest, _LAST)
    inverse = tl.where(row_scale >= _TINY, tl.div_rn(_LAST, largest), 0.0)
    tl.store(scale + row, row_scale)
    for first in range(0, columns, BLOCK):
        inside = first + at < columns
        values = tl.load(x + start + first + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(level + start + first + at, (values * inverse).to(tl.float8e4nv), mask=inside)
