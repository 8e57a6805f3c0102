"""SwiGLU and its gradient by Triton, in one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from verl.models.ops.triton.overlap import overlap, wait

_BLOCK = 1024


def launch_swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """See verl.models.ops.pointwise."""
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    if out.numel():
        grid = (out.numel() // width, triton.cdiv(width, _BLOCK))
        _forward_kernel[grid](gate_up, out, width, BLOCK=_BLOCK, **overlap(out))
    return out


def launch_swiglu_backward(grad: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """See verl.models.ops.pointwise."""
    grad, gate_up = grad.contiguous(), gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    out = torch.empty_like(gate_up)
    if out.numel():
        _backward_kernel[(grad.numel() // width, triton.cdiv(width, _BLOCK))](grad, gate_up, out, width, BLOCK=_BLOCK)
    return out


@triton.jit
def _forward_kernel(gate_up, out, width, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    wait(OVERLAPS)
    gate = tl.load(gate_up + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(grad, gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * width + at, mask=inside, other=0.0).to(tl.float32)
    d_y = tl.load(grad + row * width + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    d_gate = d_y * up * share * (1 + gate * (1 - share))
    tl.store(out + row * 2 * width + at, d_gate.to(out.dtype.element_ty), mask=inside)
    tl.store(out + (row * 2 + 1) * width + at, (d_y * gate * share).to(out.dtype.element_ty), mask=inside)
