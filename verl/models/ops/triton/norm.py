"""RMS norm with an optional residual sum, and its gradients, by Triton: one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from verl.models.ops.triton.overlap import overlap, wait

_PARTIAL_SUMS = 256  # of the weight's gradient, at most: the number must not depend on the device


def launch_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See verl.models.ops.pointwise."""
    return _forward(x, None, weight, eps)[1]


def launch_add_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See verl.models.ops.pointwise."""
    return _forward(x, delta, weight, eps)


def launch_rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, through: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See verl.models.ops.pointwise."""
    grad, x = grad.contiguous(), x.contiguous()
    through = None if through is None else through.contiguous()
    columns = x.shape[-1]
    rows = x.numel() // columns
    # a power of two, since the kernel is compiled for each value
    rows_each = triton.next_power_of_2(max(1, triton.cdiv(rows, _PARTIAL_SUMS)))
    programs = triton.cdiv(rows, rows_each)
    d_x, partial = torch.empty_like(x), x.new_empty(programs, columns, dtype=torch.float32)
    if rows:
        _backward_kernel[(programs,)](
            grad, x, weight, through, d_x, partial, rows, columns, eps, HAS_THROUGH=through is not None,
            ROWS_EACH=rows_each, **_shape(columns),
        )  # fmt: skip
    return d_x, partial.sum(0).to(weight.dtype)


def _forward(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    x, delta = x.contiguous(), None if delta is None else delta.contiguous()
    columns = x.shape[-1]
    total, out = x if delta is None else torch.empty_like(x), torch.empty_like(x)
    if x.numel():
        _forward_kernel[(x.numel() // columns,)](
            x, delta, weight, total, out, columns, eps, HAS_DELTA=delta is not None, **_shape(columns), **overlap(x)
        )
    return total, out


def _shape(columns: int) -> dict[str, int]:
    block = triton.next_power_of_2(columns)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}


@triton.jit
def _forward_kernel(
    x, delta, weight, total, out, columns, eps, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside = at < columns
    start = tl.program_id(0).to(tl.int64) * columns
    wait(OVERLAPS)
    values = tl.load(x + start + at, mask=inside, other=0.0)
    if HAS_DELTA:  # rounded, as it is stored and read by the backward
        added = values.to(tl.float32) + tl.load(delta + start + at, mask=inside, other=0.0).to(tl.float32)
        values = added.to(total.dtype.element_ty)
        tl.store(total + start + at, values, mask=inside)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / columns + eps)
    normed = wide * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + start + at, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(
    grad, x, weight, through, d_x, partial, rows, columns, eps, HAS_THROUGH: tl.constexpr, ROWS_EACH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    factor = tl.load(weight + at, mask=at < columns, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for number in range(ROWS_EACH):
        row = program * ROWS_EACH + number
        inside = (at < columns) & (row < rows)
        start = row.to(tl.int64) * columns
        values = tl.load(x + start + at, mask=inside, other=0.0).to(tl.float32)
        d_y = tl.load(grad + start + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(values * values, axis=0) / columns + eps)
        normed = values * scale
        total += d_y * normed
        weighted = d_y * factor
        gradient = scale * (weighted - normed * (tl.sum(weighted * normed, axis=0) / columns))
        if HAS_THROUGH:
            gradient += tl.load(through + start + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_x + start + at, gradient.to(d_x.dtype.element_ty), mask=inside)
    tl.store(partial + program.to(tl.int64) * columns + at, total, mask=at < columns)
