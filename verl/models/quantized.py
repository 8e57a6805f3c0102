"""Grids of low-precision numbers: int8, fp8 (e4m3) and NVFP4, as rollout engines compute with them.

A group of values has a scale, its largest magnitude over the last level: 127 of int8, 448 of e4m3. int8 has a group for each
row: an output of weights, a token of activations, whose outliers stay floats. fp8 has blocks of 128 x 128 weights, and 128
neighbours of a token. NVFP4 has e2m1 numbers, up to 6, and a scale in e4m3 for 16 neighbours of an output.
"""

import torch
import torch.nn.functional as F

BLOCK = 128
APART = 32  # see verl/csrc/int8_kernels.h
_LAST = {"int8": 127.0, "fp8": 448.0}


def levels(x: torch.Tensor, grid: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(levels of `x` [..., n] in float32, or of fp8 in e4m3; scales [..., 1]) with a group for each row. A level times its
    scale is the value that the grid has for one of `x`."""
    last, x = _LAST[grid], x.float()
    largest = x.abs().amax(-1, keepdim=True)
    scale = largest / last
    # a number over a tensor would be computed by its reciprocal, and round twice
    inverse = torch.where(scale >= torch.finfo(torch.float32).tiny, torch.full_like(largest, last) / largest, 0.0)
    scaled = x * inverse
    return (scaled.round() if grid == "int8" else scaled.to(torch.float8_e4m3fn)), scale


def outliers(x: torch.Tensor) -> torch.Tensor:
    """The activations `x` [..., n] of tokens that stay floats in int8: their squares are beyond APART times the mean."""
    squares = x.float().square()
    return squares > APART * squares.mean(-1, keepdim=True)


def fp8_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(levels of `weight` [outputs, inputs] in e4m3, scales of its blocks in float32 [outputs / 128, inputs / 128])."""
    outputs, inputs = weight.shape
    padded = F.pad(weight.float(), (0, -inputs % BLOCK, 0, -outputs % BLOCK))
    blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).transpose(1, 2).flatten(2)
    quantized, scale = levels(blocks, "fp8")
    joined = quantized.unflatten(2, (BLOCK, BLOCK)).transpose(1, 2).flatten(2, 3).flatten(0, 1)
    return joined[:outputs, :inputs].contiguous(), scale[..., 0]


def largest_of_matrices(weight: torch.Tensor) -> torch.Tensor:
    """The largest absolute value of each matrix of `weight` [..., outputs, inputs]: float32 [..., 1, 1]."""
    return weight.abs().amax((-2, -1), keepdim=True).float()


def nvfp4(weight: torch.Tensor, largest_of_all: torch.Tensor | None = None) -> torch.Tensor:
    """The values that NVFP4 has for `weight` [..., outputs, inputs], in its dtype; each matrix has a scale for its scales.
    Matrices that a sampler multiplies together share it: `largest_of_all` is of them all, see `largest_of_matrices`."""
    groups = F.pad(weight.float(), (0, -weight.shape[-1] % 16)).unflatten(-1, (-1, 16))
    largest = groups.abs().amax(-1, keepdim=True)
    if largest_of_all is None:
        largest_of_all = largest_of_matrices(weight)
    matrix_scale = (largest_of_all[..., None] / (6.0 * 448.0)).clamp(min=torch.finfo(torch.float32).tiny)
    scale = (largest / (6.0 * matrix_scale)).to(torch.float8_e4m3fn).float() * matrix_scale
    scaled = torch.where(scale > 0.0, groups / scale, 0.0).clamp(-6.0, 6.0)
    step = torch.where(scaled.abs() < 2.0, 0.5, torch.where(scaled.abs() < 4.0, 1.0, 2.0))
    rounded: torch.Tensor = ((scaled / step).round() * step * scale).flatten(-2)
    return rounded[..., : weight.shape[-1]].to(weight.dtype)


def on_grid(x: torch.Tensor, grid: str, *, weights: bool = False) -> torch.Tensor:
    """The values that `grid` has for `x` [..., n] in float32: of activations, or of `weights` [outputs, inputs]."""
    if grid == "int8":
        apart = torch.zeros_like(x, dtype=torch.bool) if weights else outliers(x)
        level, scale = levels(x.masked_fill(apart, 0.0), grid)
        return torch.where(apart, x.float(), level * scale)
    if weights:
        level, scale = fp8_blocks(x)
        return level.float() * scale.repeat_interleave(BLOCK, 0)[: len(x)].repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
    level, scale = levels(F.pad(x, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK)), grid)
    return (level.float() * scale).flatten(-2)[..., : x.shape[-1]]
