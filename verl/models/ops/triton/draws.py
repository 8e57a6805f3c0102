"""Random numbers of rows, and the columns of the rows after a step, by Triton; exact."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 128
_GOLDEN = -0x61C8864680B583EB  # the constants of verl.rollout.uniforms as int64
_MULTIPLIERS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
_SHIFTS = (30, 27, 31)


def launch_uniforms_at(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """See verl.rollout.uniforms; both int64 [n]."""
    keys, positions = keys.contiguous(), positions.contiguous()
    out = torch.empty(keys.shape, dtype=torch.float64, device=keys.device)
    if len(keys):
        _uniforms_kernel[(triton.cdiv(len(keys), _BLOCK),)](
            keys, positions, out, len(keys), GOLDEN=_GOLDEN, FIRST=_MULTIPLIERS[0], SECOND=_MULTIPLIERS[1],
            SHIFT_1=_SHIFTS[0], SHIFT_2=_SHIFTS[1], SHIFT_3=_SHIFTS[2], BLOCK=_BLOCK,
        )  # fmt: skip
    return out


def launch_advance(
    tokens: torch.Tensor,
    log_probs: torch.Tensor,
    columns: torch.Tensor,
    step: torch.Tensor,
    limit: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """See verl.rollout.native.cuda.device."""
    num_columns, rows = columns.shape
    assert columns.stride(1) == out.stride(1) == 1
    _advance_kernel[(triton.cdiv(rows, _BLOCK),)](
        tokens, log_probs, columns, step, limit, out, rows, columns.stride(0), out.stride(0),
        NUM_COLUMNS=num_columns, BLOCK=_BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def _uniforms_kernel(
    keys, positions, out, count, GOLDEN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    SHIFT_1: tl.constexpr, SHIFT_2: tl.constexpr, SHIFT_3: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    bits = tl.load(positions + at, mask=inside, other=0)
    for part in tl.static_range(2):
        if part == 1:
            bits = tl.load(keys + at, mask=inside, other=0) ^ bits
        bits += GOLDEN
        bits = (bits ^ _shift_right(bits, SHIFT_1)) * FIRST
        bits = (bits ^ _shift_right(bits, SHIFT_2)) * SECOND
        bits = bits ^ _shift_right(bits, SHIFT_3)
    tl.store(out + at, (_shift_right(bits, 12).to(tl.float64) + 0.5) * 2.220446049250313e-16, mask=inside)


@triton.jit
def _shift_right(value, SHIFT: tl.constexpr):
    return (value >> SHIFT) & ((1 << (64 - SHIFT)) - 1)


@triton.jit(do_not_specialize=["rows"])
def _advance_kernel(
    tokens, log_probs, columns, step, limit, out, rows, stride, out_stride, NUM_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < rows
    token = tl.load(tokens + at, mask=inside, other=0)
    tl.store(out + at, token.to(tl.int32), mask=inside)
    bits = tl.load(log_probs + at, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    tl.store(out + out_stride + at, bits, mask=inside)
    for column in tl.static_range(NUM_COLUMNS):
        to = columns + column * stride + at
        value = token if column == 0 else tl.load(to, mask=inside, other=0)
        value = tl.minimum(value + tl.load(step + column), tl.load(limit + column))
        tl.store(to, value, mask=inside)
