"""Pointwise operations of a decoder layer with their gradients: RMS norm, rotary embedding, SwiGLU.

All work on [tokens, features], in blocks of tokens that stay in the processor's cache, since their cost is memory
traffic. Dtypes and roundings are the same as in the families' modules: the norm is computed in float32 (or wider) and
rounded before it is multiplied by its weight.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from verl.models.decoder.weights import Norm
from verl.models.ops import compiled

_aten = torch.ops.aten

_BLOCK_BYTES = 1 << 20  # of the widest operand; the level-2 caches of two cores hold it with its companions


def _blocks(x: torch.Tensor) -> Iterator[slice]:
    """Slices of rows of about `_BLOCK_BYTES` each; a GPU takes all at once."""
    rows = len(x)
    size = rows if x.device.type != "cpu" else max(1, _BLOCK_BYTES // (x.shape[1] * x.element_size()))
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def inverse_rms(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """1 / sqrt(mean(x^2) + norm.eps) over the last axis, which is kept; float32 or wider."""
    if x.dtype == torch.bfloat16 and compiled.usable(x):
        rows = x.reshape(-1, x.shape[-1])
        out = torch.empty(*x.shape[:-1], 1)
        compiled.run_rows(compiled.INVERSE_RMS, rows, out, columns=x.shape[-1], eps=norm.eps)
        return out
    wide = torch.promote_types(x.dtype, torch.float32)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    inverse: torch.Tensor = length.square_().div_(x.shape[-1]).add_(norm.eps).rsqrt_()
    return inverse


def rms_norm(x: torch.Tensor, norm: Norm, scale: torch.Tensor) -> torch.Tensor:
    """x [..., features] normalised over its last axis; `scale` is its inverse_rms."""
    weight = norm.weight.detach()
    if compiled.usable(x, weight) and scale.dtype == torch.float32:
        rows, out = x.reshape(-1, x.shape[-1]), torch.empty(x.shape, dtype=x.dtype)
        compiled.run_rows(compiled.RMS_NORM, rows, out, columns=x.shape[-1], weight=weight, scale=scale)
        return out
    if x.dtype == scale.dtype:
        return torch.mul(x, scale).mul_(norm.weight)
    return torch.mul(x, scale).to(x.dtype).mul_(norm.weight)


def rms_norm_backward_(
    d_x: torch.Tensor, d_y: torch.Tensor, x: torch.Tensor, norm: Norm, scale: torch.Tensor
) -> torch.Tensor:
    """Adds the gradient of the norm's input to `d_x` [tokens, features], given `d_y`, which may be overwritten. `scale`
    [tokens, 1] is the inverse_rms of `x`. Returns the gradient of the weight [features].

    With r the inverse RMS and n features: d_x = r (d_y w) - x r^3 <d_y x, w> / n, d_w = sum over tokens of r d_y x.
    """
    weight = norm.weight.detach()
    is_plain = all(t.is_contiguous() for t in (d_x, d_y, x)) and scale.dtype == torch.float32
    if is_plain and compiled.usable(d_x, d_y, x, weight):
        backward, columns = compiled.RMS_NORM_BACKWARD, x.shape[1]
        summed = compiled.run_rows(backward, x, d_x, columns=columns, d_y=d_y, weight=weight, scale=scale, sums=True)
        assert summed is not None
        return summed
    weight = weight.to(scale.dtype)
    product = torch.mul(d_y, x) if d_y.dtype == scale.dtype else d_y.to(scale.dtype).mul_(x)
    d_weight = torch.mv(product.t(), scale.squeeze(1))
    pull = torch.mv(product, weight).unsqueeze(1).mul_(scale.pow(3)).div_(-x.shape[1])
    if d_y.dtype == scale.dtype:
        d_x.addcmul_(d_y.mul_(weight), scale).addcmul_(x, pull)
    else:
        d_x.add_((d_y.mul_(norm.weight) * scale).addcmul_(x.to(scale.dtype), pull))
    return d_weight


class Rotary:
    """The rotary embedding at fixed positions. cos and sin are [tokens, head_dim]."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor):
        half = cos.shape[-1] // 2
        first, second = sin[:, :half], sin[:, half:]
        self._cos = cos.contiguous().unsqueeze(1)
        # y = x cos + swap(x) turn, swap exchanging the halves; its transpose is the same with another `turn`
        self._turn = torch.cat([-first, second], dim=1).unsqueeze(1)
        self._turn_back = torch.cat([second, -first], dim=1).unsqueeze(1)

    def rotate_(self, x: torch.Tensor) -> None:
        """x [tokens, heads, head_dim], in place."""
        self._apply_(x, self._turn)

    def rotate_gradient_(self, d_y: torch.Tensor) -> None:
        """The gradient of `rotate_`, in place."""
        self._apply_(d_y, self._turn_back)

    def _apply_(self, x: torch.Tensor, turn: torch.Tensor) -> None:
        if x.stride(1) == x.shape[2] and x.stride(2) == 1 and compiled.usable(x, turn):
            compiled.run_rows(compiled.ROTATE, x, columns=x.shape[2], weight=turn, scale=self._cos)
            return
        half = x.shape[-1] // 2
        swapped = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        torch.mul(x[..., half:], turn[..., :half], out=swapped[..., :half])
        torch.mul(x[..., :half], turn[..., half:], out=swapped[..., half:])
        x.mul_(self._cos).add_(swapped)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up [tokens, features], for both back to back [tokens, 2 features]."""
    gate, up = gate_up.chunk(2, dim=1)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if gate_up.is_contiguous() and compiled.usable(gate_up):
        compiled.run_rows(compiled.SWIGLU, gate_up, out, columns=gate.shape[1])
        return out
    for part in _blocks(gate_up):
        _aten.silu.out(gate[part], out=out[part]).mul_(up[part])
    return out


def swiglu_backward_(d_out: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """Turns `gate_up` into its gradient, given the gradient of swiglu(gate_up). Returns swiglu(gate_up), computed again."""
    gate, up = gate_up.chunk(2, dim=1)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if gate_up.is_contiguous() and d_out.is_contiguous() and compiled.usable(gate_up, d_out):
        compiled.run_rows(compiled.SWIGLU_BACKWARD, gate_up, out, columns=gate.shape[1], d_y=d_out)
        return out
    for part in _blocks(gate_up):
        g, u, d = gate[part], up[part], d_out[part]
        activated = _aten.silu(g)
        torch.mul(activated, u, out=out[part])
        d_activated = torch.mul(d, u)
        torch.mul(d, activated, out=u)
        _aten.silu_backward.grad_input(d_activated, g, grad_input=g)
    return out
