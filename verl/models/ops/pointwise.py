"""Pointwise parts of a decoder layer: RMS norm, residual sum, SwiGLU, rotary embedding, also into a store of keys.

Dtypes and roundings by torch and by the compiled kernels are the same as in the modules of transformers: the norm is computed
in float32 (or wider) and rounded before it is multiplied by its weight. Triton computes each op in one kernel. Its intermediate
values are float32, and are rounded once. Names that end in _ write into arguments, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import NamedTuple

import torch

from verl.models.hf_module import AutogradContext
from verl.models.ops import compiled
from verl.models.ops.table import by_torch, differentiate, op
from verl.parallel.device import write_at

_aten = torch.ops.aten

_BLOCK_BYTES = 1 << 20  # of the widest operand; the level-2 caches of two cores hold it with its companions


def _blocks(x: torch.Tensor) -> Iterator[slice]:
    """Slices of rows of about `_BLOCK_BYTES` each; a GPU takes all at once."""
    rows = len(x)
    size = max(1, _BLOCK_BYTES // (x.shape[1] * x.element_size()) if x.device.type == "cpu" else rows)
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[..., columns] -> [rows, columns] that lie back to back: the one head of each token is a view with gaps."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def _compiled_inverse_rms(x: torch.Tensor, eps: float) -> object:
    if x.dtype != torch.bfloat16 or not compiled.usable(x):
        return NotImplemented
    out = torch.empty(*x.shape[:-1], 1)
    compiled.run_rows(compiled.INVERSE_RMS, _rows(x), out, columns=x.shape[-1], eps=eps)
    return out


@op(compiled=_compiled_inverse_rms)
def inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last axis; it is kept; float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    inverse: torch.Tensor = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return inverse


def _compiled_scaled_norm(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> object:
    if scale.dtype != torch.float32 or not compiled.usable(x, weight):
        return NotImplemented
    rows, out = _rows(x), torch.empty(x.shape, dtype=x.dtype)
    compiled.run_rows(compiled.RMS_NORM, rows, out, columns=x.shape[-1], weight=weight, scale=scale)
    return out


@op(compiled=_compiled_scaled_norm)
def scaled_norm(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The `rms_norm` of x [..., features], for its inverse_rms `scale`. A wider `weight` multiplies before the rounding."""
    normed = torch.mul(x, scale)
    return (normed.to(x.dtype) if weight.dtype == x.dtype else normed).mul_(weight).to(x.dtype)


@op(triton="norm:launch_rms_norm")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis in float32 or wider, times `weight`; differentiable."""
    return by_torch(scaled_norm)(x, weight, by_torch(inverse_rms)(x, eps))


@op(triton="norm:launch_add_norm")
def add_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + delta, its RMS norm), all [tokens, hidden]; differentiable."""
    total = x + delta
    return total, by_torch(rms_norm)(total, weight, eps)


def _compiled_norm_backward(
    d_x: torch.Tensor, d_y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> object:
    is_plain = all(t.is_contiguous() for t in (d_x, d_y, x)) and scale.dtype == torch.float32
    if not is_plain or not compiled.usable(d_x, d_y, x, weight):
        return NotImplemented
    backward, columns = compiled.RMS_NORM_BACKWARD, x.shape[1]
    return compiled.run_rows(backward, x, d_x, columns=columns, d_y=d_y, weight=weight, scale=scale, sums=True)


@op(compiled=_compiled_norm_backward, writes=("d_x", "d_y"))
def rms_norm_backward_(
    d_x: torch.Tensor, d_y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """Adds the gradient of the norm's input to `d_x` [tokens, features], given `d_y`; that may be overwritten. `scale`
    [tokens, 1] is the inverse_rms of `x`. Returns the gradient of the weight [features], float32 or wider.

    With r the inverse RMS and n features: d_x = r (d_y w) - x r^3 <d_y x, w> / n, d_w = sum over tokens of r d_y x.
    """
    wide = weight.to(scale.dtype)
    product = torch.mul(d_y, x) if d_y.dtype == scale.dtype else d_y.to(scale.dtype).mul_(x)
    d_weight = torch.mv(product.t(), scale.squeeze(1))
    pull = torch.mv(product, wide).unsqueeze(1).mul_(scale.pow(3)).div_(-x.shape[1])
    if d_y.dtype == scale.dtype:
        d_x.addcmul_(d_y.mul_(wide), scale).addcmul_(x, pull)
    else:
        d_x.add_((d_y.mul_(weight) * scale).addcmul_(x.to(scale.dtype), pull))
    return d_weight


@op(triton="norm:launch_rms_norm_backward")
def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, through: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the input of `rms_norm`, with `through` added, and of its weight."""
    d_x = torch.zeros_like(x) if through is None else through.clone()
    rows, d_y, into = (t.reshape(-1, x.shape[-1]) for t in (x, grad.clone(), d_x))
    d_weight = by_torch(rms_norm_backward_)(into, d_y, rows, weight, by_torch(inverse_rms)(rows, eps))
    return into.view_as(x), d_weight.to(weight.dtype)


def _compiled_swiglu(gate_up: torch.Tensor) -> object:
    if not gate_up.is_contiguous() or not compiled.usable(gate_up):
        return NotImplemented
    out = torch.empty(len(gate_up), gate_up.shape[1] // 2, dtype=gate_up.dtype)
    compiled.run_rows(compiled.SWIGLU, gate_up, out, columns=out.shape[1])
    return out


@op(triton="swiglu:launch_swiglu", compiled=_compiled_swiglu)
def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """[tokens, 2 * width] -> silu(first half) * second half; differentiable."""
    gate, up = gate_up.chunk(2, dim=1)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    for part in _blocks(gate_up):
        _aten.silu.out(gate[part], out=out[part]).mul_(up[part])
    return out


def _compiled_swiglu_backward(d_out: torch.Tensor, gate_up: torch.Tensor) -> object:
    if not gate_up.is_contiguous() or not d_out.is_contiguous() or not compiled.usable(gate_up, d_out):
        return NotImplemented
    out = torch.empty(d_out.shape, dtype=d_out.dtype)
    compiled.run_rows(compiled.SWIGLU_BACKWARD, gate_up, out, columns=out.shape[1], d_y=d_out)
    return out


@op(compiled=_compiled_swiglu_backward, writes=("gate_up",))
def swiglu_backward_(d_out: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """Turns `gate_up` into its gradient, given the gradient of swiglu(gate_up). Returns swiglu(gate_up), computed again."""
    gate, up = gate_up.chunk(2, dim=1)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    for part in _blocks(gate_up):
        g, u, d = gate[part], up[part], d_out[part]
        activated = _aten.silu(g)
        torch.mul(activated, u, out=out[part])
        d_activated = torch.mul(d, u)
        torch.mul(d, activated, out=u)
        _aten.silu_backward.grad_input(d_activated, g, grad_input=g)
    return out


@op(triton="swiglu:launch_swiglu_backward")
def swiglu_backward(grad: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """The gradient of the input of `swiglu`."""
    d_gate_up = gate_up.clone()
    by_torch(swiglu_backward_)(grad, d_gate_up)
    return d_gate_up


@op(writes=("gate_up",))
def geglu_backward_(d_out: torch.Tensor, gate_up: torch.Tensor, approximate: str) -> torch.Tensor:
    """As swiglu_backward_, of geglu(gate_up)."""
    gate, up = gate_up.chunk(2, dim=1)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    for part in _blocks(gate_up):
        g, u, d = gate[part], up[part], d_out[part]
        activated = _aten.gelu(g, approximate=approximate)
        torch.mul(activated, u, out=out[part])
        d_activated = torch.mul(d, u)
        torch.mul(d, activated, out=u)
        _aten.gelu_backward.grad_input(d_activated, g, approximate=approximate, grad_input=g)
    return out


@op()
def geglu(gate_up: torch.Tensor, approximate: str) -> torch.Tensor:
    """[tokens, 2 * width] -> gelu(first half) * second half, with the `approximate` of torch's gelu; differentiable."""
    gate, up = gate_up.chunk(2, dim=1)
    activated: torch.Tensor = _aten.gelu(gate, approximate=approximate)
    return activated.mul_(up)


def _compiled_rotate(x: torch.Tensor, cos: torch.Tensor, turn: torch.Tensor, pairs: bool) -> object:
    is_whole = not pairs and cos.shape[-1] == x.shape[-1]
    if not is_whole or x.stride(1) != x.shape[2] or x.stride(2) != 1 or not compiled.usable(x, turn):
        return NotImplemented
    return compiled.run_rows(compiled.ROTATE, x, columns=x.shape[2], weight=turn, scale=cos)


@op(compiled=_compiled_rotate, writes=("x",))
def rotate_(x: torch.Tensor, cos: torch.Tensor, turn: torch.Tensor, pairs: bool) -> None:
    """x cos + (x exchanged) turn, of x [tokens, heads, head_dim] by cos and turn [tokens, 1, width]. The first `width` elements
    of heads turn, and exchanged are their halves, or with `pairs` neighbours."""
    x = x[..., : cos.shape[-1]]
    swapped = _exchanged(x, pairs).mul_(turn)
    x.mul_(cos).add_(swapped)


def _exchanged(x: torch.Tensor, pairs: bool) -> torch.Tensor:
    """A copy of x [..., width] with its halves, or neighbours, exchanged."""
    return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if pairs else x.roll(x.shape[-1] // 2, -1)


class Turns:
    """The rotary embedding at fixed positions. cos and sin are [tokens, width], their halves alike. If `pairs`, an angle turns
    two neighbours, else two elements half a width apart."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor, pairs: bool = False):
        self.pairs = pairs
        if pairs:
            cos, sin = (x.chunk(2, dim=1)[0].repeat_interleave(2, dim=1) for x in (cos, sin))
        self.cos, self._sin = cos.contiguous().unsqueeze(1), sin.unsqueeze(1)

    @cached_property
    def turn(self) -> torch.Tensor:
        """Sines, negative for the first element of two."""
        signs = self._sin.new_tensor([-1.0, 1.0])
        width = self._sin.shape[-1] // 2
        return self._sin * (signs.repeat(width) if self.pairs else signs.repeat_interleave(width))

    @cached_property
    def turn_back(self) -> torch.Tensor:
        """In place of `turn`, for the gradient."""
        return _exchanged(self.turn, self.pairs)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """The rotary embedding of x [tokens, heads, head_dim]; differentiable."""
        width = self.cos.shape[-1]
        turned = x[..., :width]
        turned = turned * self.cos + _exchanged(turned, self.pairs) * self.turn
        return turned if width == x.shape[-1] else torch.cat([turned, x[..., width:]], dim=-1)

    def rotate_(self, x: torch.Tensor, back: bool = False) -> None:
        """`rotated` in place; with `back` for a gradient."""
        rotate_(x, self.cos, self.turn_back if back else self.turn, self.pairs)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The rotary embedding of x [tokens, heads, head_dim] by cos and sin [tokens, head_dim]."""
    return Turns(cos, sin).rotated(x)


@op(triton="rotary:launch_write_kv", writes=("store",))
def write_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    store: torch.Tensor,
    places: torch.Tensor,
) -> torch.Tensor:
    """Queries [tokens, heads, head_dim] of the joined projections [tokens, (heads + 2 kv_heads) * head_dim]; keys and values
    go to `store` [2, slots, kv_heads, head_dim] at `places` (int64 [tokens], all different).

    Queries and keys are rotated by cos and sin [tokens, head_dim]. Before it they are normalised if the weights [head_dim] of
    their RMS norms are given. Without gradient."""
    kv_heads, head_dim = store.shape[-2:]
    heads = qkv.shape[-1] // head_dim - 2 * kv_heads
    q, k, v = qkv.unflatten(-1, (heads + 2 * kv_heads, head_dim)).split([heads, kv_heads, kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = by_torch(rms_norm)(q, q_norm, eps), by_torch(rms_norm)(k, k_norm, eps)
    write_at(store, 1, places, torch.stack([rotated(k, cos, sin), v]))
    return rotated(q, cos, sin)


def _save_norm(ctx: AutogradContext, inputs: tuple[object, ...], output: torch.Tensor) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _norm_gradients(ctx: AutogradContext, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    return (*rms_norm_backward(grad, x, weight, ctx.eps, None), None)


def _save_sum(ctx: AutogradContext, inputs: tuple[object, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(output[0], inputs[2])
    ctx.eps = inputs[3]


def _sum_gradients(ctx: AutogradContext, through: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    d_x, d_weight = rms_norm_backward(grad, x, weight, ctx.eps, through)
    return d_x, d_x, d_weight, None


def _save_gate(ctx: AutogradContext, inputs: tuple[object, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _save_gelu(ctx: AutogradContext, inputs: tuple[object, ...], output: torch.Tensor) -> None:
    gate_up, ctx.approximate = inputs
    ctx.save_for_backward(gate_up)


def _gelu_gradient(ctx: AutogradContext, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    d_gate_up = ctx.saved_tensors[0].clone()
    geglu_backward_(grad, d_gate_up, ctx.approximate)
    return d_gate_up, None


def _gate_gradient(ctx: AutogradContext, grad: torch.Tensor) -> torch.Tensor:
    return swiglu_backward(grad, *ctx.saved_tensors)


differentiate(rms_norm, _norm_gradients, _save_norm)
differentiate(add_norm, _sum_gradients, _save_sum)
differentiate(swiglu, _gate_gradient, _save_gate)
differentiate(geglu, _gelu_gradient, _save_gelu)


class Activation(NamedTuple):
    """A gated activation and, as swiglu_backward_, its backward."""

    gated: Callable[[torch.Tensor], torch.Tensor]
    backward_: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _gelu(approximate: str) -> Activation:
    return Activation(partial(geglu, approximate=approximate), partial(geglu_backward_, approximate=approximate))


# by the name in a config
ACTIVATIONS = {"silu": Activation(swiglu, swiglu_backward_), "gelu_pytorch_tanh": _gelu("tanh"), "gelu": _gelu("none")}
