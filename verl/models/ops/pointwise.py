"""Pointwise parts of a decoder layer as ops, with gradients: RMS norm, residual sum, SwiGLU, rotary embedding into a store.

Triton computes each in one kernel on a GPU. Its intermediate values are float32, and are rounded once. torch rounds after
each operation, as the modules of transformers do.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F

from verl.models.hf_module import AutogradContext
from verl.models.ops.table import differentiate, kernel
from verl.parallel.device import write_at


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def _rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, through: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x, to which `through` is added, and of the weight."""
    wide = torch.promote_types(x.dtype, torch.float32)
    grad, values = grad.to(wide), x.to(wide)
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    normed, weighted = values * scale, grad * weight
    d_x = scale * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
    d_x = d_x if through is None else d_x + through
    return d_x.to(x.dtype), (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)


def _add_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + delta
    return total, _rms_norm(total, weight, eps)


def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _swiglu_backward(grad: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(gate_up.dtype, torch.float32)
    grad, (gate, up) = grad.to(wide), gate_up.to(wide).chunk(2, dim=-1)
    share = gate.sigmoid()
    d_gate = grad * up * share * (1 + gate * (1 - share))
    return torch.cat([d_gate, grad * gate * share], dim=-1).to(gate_up.dtype)


def _write_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    store: torch.Tensor,
    places: torch.Tensor,
) -> torch.Tensor:
    kv_heads, head_dim = store.shape[-2:]
    heads = qkv.shape[-1] // head_dim - 2 * kv_heads
    q, k, v = qkv.unflatten(-1, (heads + 2 * kv_heads, head_dim)).split([heads, kv_heads, kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = _rms_norm(q, q_norm, eps), _rms_norm(k, k_norm, eps)
    write_at(store, 1, places, torch.stack([rotated(k, cos, sin), v]))
    return rotated(q, cos, sin)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The rotary embedding of x [tokens, heads, head_dim] by cos and sin [tokens, head_dim]; differentiable."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(1) + torch.cat([-second, first], dim=-1) * sin.unsqueeze(1)


_RMS_NORM = kernel("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", _rms_norm, "norm:launch_rms_norm")
_ADD_NORM = kernel(
    "add_norm(Tensor x, Tensor delta, Tensor weight, float eps) -> (Tensor, Tensor)", _add_norm, "norm:launch_add_norm"
)
_RMS_NORM_BACKWARD = kernel(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, float eps, Tensor? through) -> (Tensor, Tensor)",
    _rms_norm_backward,
    "norm:launch_rms_norm_backward",
)
_SWIGLU = kernel("swiglu(Tensor gate_up) -> Tensor", _swiglu, "swiglu:launch_swiglu")
_SWIGLU_BACKWARD = kernel(
    "swiglu_backward(Tensor grad, Tensor gate_up) -> Tensor", _swiglu_backward, "swiglu:launch_swiglu_backward"
)
_WRITE_KV = kernel(
    "write_kv(Tensor qkv, Tensor cos, Tensor sin, Tensor? q_norm, Tensor? k_norm, float eps, Tensor(a!) store, "
    "Tensor places) -> Tensor",
    _write_kv,
    "rotary:launch_write_kv",
)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis in float32 or wider, times `weight`; differentiable."""
    return cast("torch.Tensor", _RMS_NORM(x, weight, eps))


def add_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + delta, its RMS norm), all [tokens, hidden]; differentiable."""
    return cast("tuple[torch.Tensor, torch.Tensor]", _ADD_NORM(x, delta, weight, eps))


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """[tokens, 2 * width] -> silu(first half) * second half; differentiable."""
    return cast("torch.Tensor", _SWIGLU(gate_up))


def write_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    store: torch.Tensor,
    places: torch.Tensor,
) -> torch.Tensor:
    """Queries [tokens, heads, head_dim] of the joined projections [tokens, (heads + 2 kv_heads) * head_dim]; keys and values
    go to `store` [2, slots, kv_heads, head_dim] at `places` (int64 [tokens], all different).

    Queries and keys are rotated by cos and sin [tokens, head_dim], and normalised before it if `norms` has the weights
    [head_dim] of their RMS norms and eps. Without gradient."""
    return cast("torch.Tensor", _WRITE_KV(qkv, cos, sin, *(norms or (None, None, 0.0)), store, places))


def _save_norm(ctx: AutogradContext, inputs: tuple[object, ...], output: torch.Tensor) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _norm_gradients(ctx: AutogradContext, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return (*_RMS_NORM_BACKWARD(grad, *ctx.saved_tensors, ctx.eps, None), None)


def _save_sum(ctx: AutogradContext, inputs: tuple[object, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(output[0], inputs[2])
    ctx.eps = inputs[3]


def _sum_gradients(ctx: AutogradContext, through: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    d_x, d_weight = _RMS_NORM_BACKWARD(grad, *ctx.saved_tensors, ctx.eps, through)
    return d_x, d_x, d_weight, None


def _save_gate(ctx: AutogradContext, inputs: tuple[object, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gate_gradient(ctx: AutogradContext, grad: torch.Tensor) -> torch.Tensor:
    return cast("torch.Tensor", _SWIGLU_BACKWARD(grad, *ctx.saved_tensors))


differentiate(_RMS_NORM, _norm_gradients, _save_norm)
differentiate(_ADD_NORM, _sum_gradients, _save_sum)
differentiate(_SWIGLU, _gate_gradient, _save_gate)
