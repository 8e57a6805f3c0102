"""Hand-written forward and backward of one decoder layer.

    x -> norm -> q, k, v -> rotary -> attention -> o -> (+ x) = middle -> norm -> gate, up -> swiglu -> down -> (+ middle)

Saved from forward to backward are layer inputs, results of matmuls and the attention's output; norms and swiglu are
computed again, which costs less than keeping them. The backward overwrites the kept tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from verl.models.attention import Scoring
from verl.models.decoder.reuse import LayerActivations
from verl.models.decoder.weights import DenseDecoder, DenseLayer, Norm, Projection
from verl.models.grad_buffers import GradientBuffers
from verl.models.ops.linear import Matmul
from verl.models.ops.rows import Rotary, inverse_rms, rms_norm, rms_norm_backward_, swiglu, swiglu_backward_
from verl.models.packed import PackedLayout, choose_kernel, flash_backward, flash_forward


@dataclass(frozen=True)
class HeadViews:
    """Queries, keys and values as attention reads them: [1, heads, tokens, head_dim] each, views of [tokens, ...]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class Attended:
    """`out` [tokens, heads * head_dim], and the values that the backward needs."""

    out: torch.Tensor
    lse: torch.Tensor | None = None
    graph: tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None = None


def attend(layout: PackedLayout, index: int, heads: HeadViews, scoring: Scoring, by: Matmul, keep: bool) -> Attended:
    """Attention of layer `index`; with `keep`, fit for `attend_backward`."""
    q, k, v = heads.q, heads.k, heads.v
    if choose_kernel(q, layout.without_idle_window(scoring)) == "flash_cpu":
        _, num_heads, tokens, head_dim = q.shape
        q, k, v = by.operand(q), by.operand(k), by.operand(v)
        out = q.new_empty(tokens, num_heads, head_dim)
        lse = flash_forward(layout, q, k, v, _as_heads(out), scoring.scale)
        return Attended(out.flatten(1).to(heads.q.dtype), lse if keep else None)
    if not keep:
        return Attended(layout.attend(index, q, k, v, scoring)[0].flatten(1))
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    with torch.enable_grad():
        attended = layout.attend(index, q, k, v, scoring)
    return Attended(attended.detach()[0].flatten(1), graph=(attended, (q, k, v)))


def attend_backward(
    layout: PackedLayout,
    heads: HeadViews,
    attended: Attended,
    d_out: torch.Tensor,
    scale: float,
    by: Matmul,
    into: HeadViews,
) -> None:
    """Writes the gradients of queries, keys and values into `into`, given the gradient of the output."""
    if attended.graph is not None:
        out, leaves = attended.graph
        grads = torch.autograd.grad(out, leaves, d_out.view_as(out))
        for target, grad in zip((into.q, into.k, into.v), grads, strict=True):
            target.copy_(grad)
        return
    assert attended.lse is not None
    shape = (d_out.shape[0], heads.q.shape[1], heads.q.shape[3])
    out, d_out = (by.operand(_as_heads(x.view(shape))) for x in (attended.out, d_out))
    q, k, v = by.operand(heads.q), by.operand(heads.k), by.operand(heads.v)
    flash_backward(layout, d_out, q, k, v, out, attended.lse, scale, (into.q, into.k, into.v))


def _as_heads(x: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, head_dim] -> [1, heads, tokens, head_dim], a view."""
    return x.transpose(0, 1).unsqueeze(0)


@dataclass(frozen=True)
class Pass:
    """State that all layers of one pass share."""

    decoder: DenseDecoder
    layout: PackedLayout
    rotary: Rotary
    matmul: Matmul


@dataclass
class Saved:
    """Activations of one layer, all [tokens, ...]. Scales are the inverse RMS of what stands before them."""

    x: torch.Tensor
    x_scale: torch.Tensor
    qkv: torch.Tensor  # rotated, unless the heads are normed: then as projected
    heads: HeadViews
    attended: Attended
    middle: torch.Tensor
    middle_scale: torch.Tensor
    gate_up: torch.Tensor | None  # None: computed in chunks, and so again


@dataclass(frozen=True)
class Normed:
    """A norm, its input, and the inverse RMS of the input."""

    norm: Norm
    x: torch.Tensor
    scale: torch.Tensor


def forward(run: Pass, index: int, x: torch.Tensor, keep: bool) -> tuple[torch.Tensor, Saved | None]:
    """The layer's output [tokens, hidden] for its input, and with `keep` what its backward needs."""
    layer, matmul = run.decoder.layers[index], run.matmul
    x_scale = inverse_rms(x, layer.input_norm)
    qkv = matmul.linear(rms_norm(x, layer.input_norm, x_scale), layer.qkv.weight, layer.qkv.bias)
    heads = _heads(run, layer, qkv)
    attended = attend(run.layout, index, heads, Scoring(run.decoder.scale, layer.sliding_window), matmul, keep)
    middle = matmul.linear(attended.out, layer.o.weight, layer.o.bias, residual=x)
    middle_scale = inverse_rms(middle, layer.post_norm)
    size = run.layout.chunk_tokens
    if size is not None and size < len(middle):
        parts = (slice(start, start + size) for start in range(0, len(middle), size))
        out = torch.cat([_feed_forward(run, layer, middle[part], middle_scale[part])[0] for part in parts])
        gate_up = None
    else:
        out, gate_up = _feed_forward(run, layer, middle, middle_scale)
    return out, Saved(x, x_scale, qkv, heads, attended, middle, middle_scale, gate_up) if keep else None


def saved_of(run: Pass, index: int, values: LayerActivations) -> Saved:
    """The activations that `forward` keeps, from `values` of the sampler, which are overwritten."""
    x, qkv, out, middle, gate_up, lse = values
    layer = run.decoder.layers[index]
    heads, attended = _heads(run, layer, qkv), Attended(out, lse.t().unsqueeze(0))
    scales = inverse_rms(x, layer.input_norm), inverse_rms(middle, layer.post_norm)
    return Saved(x, scales[0], qkv, heads, attended, middle, scales[1], gate_up)


def backward(run: Pass, index: int, saved: Saved, d_out: torch.Tensor, gradients: GradientBuffers) -> torch.Tensor:
    """The gradient of the layer's input, given the output's gradient, which is overwritten."""
    layer, matmul = run.decoder.layers[index], run.matmul
    d_middle = _feed_forward_backward_(run, layer, saved, d_out, gradients)
    d_o = matmul.operand(d_middle)
    d_attended = matmul.input_gradient(d_o, layer.o.weight)
    _add_weight_gradient(layer.o, d_o, saved.attended.out, run, gradients)
    d_qkv = torch.empty_like(saved.qkv)
    into = _views(run.decoder, d_qkv)
    attend_backward(run.layout, saved.heads, saved.attended, d_attended, run.decoder.scale, matmul, into)
    _heads_backward_(run, layer, saved, d_qkv, gradients)
    normed = Normed(layer.input_norm, saved.x, saved.x_scale)
    return _norm_and_projection_backward(run, normed, layer.qkv, d_qkv, d_middle, gradients)


def _feed_forward(
    run: Pass, layer: DenseLayer, middle: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The second half of a layer for some tokens of `middle`: its output, and gate_up."""
    normed = rms_norm(middle, layer.post_norm, scale)
    gate_up = run.matmul.linear(normed, layer.gate_up.weight, layer.gate_up.bias)
    out = run.matmul.linear(swiglu(gate_up), layer.down.weight, layer.down.bias, residual=middle)
    return out, gate_up


def _feed_forward_backward_(
    run: Pass, layer: DenseLayer, saved: Saved, d_out: torch.Tensor, gradients: GradientBuffers
) -> torch.Tensor:
    """Turns `d_out` into the gradient of `middle`, in chunks where the forward went in chunks."""
    matmul, chunk = run.matmul, run.layout.chunk_tokens if saved.gate_up is None else None
    size = chunk or len(d_out)
    for start in range(0, len(d_out), size):
        part = slice(start, start + size)
        middle, scale, d_part = saved.middle[part], saved.middle_scale[part], d_out[part]
        gate_up = saved.gate_up
        if gate_up is None:
            normed = rms_norm(middle, layer.post_norm, scale)
            gate_up = matmul.linear(normed, layer.gate_up.weight, layer.gate_up.bias)
        d_down = matmul.operand(d_part)
        d_activated = matmul.input_gradient(d_down, layer.down.weight)
        activated = swiglu_backward_(d_activated, gate_up)  # which is now its own gradient
        _add_weight_gradient(layer.down, d_down, activated, run, gradients)
        normed_by = Normed(layer.post_norm, middle, scale)
        _norm_and_projection_backward(run, normed_by, layer.gate_up, gate_up, d_part, gradients)
    return d_out


def _heads(run: Pass, layer: DenseLayer, qkv: torch.Tensor) -> HeadViews:
    """Inputs of attention, rotated: views of `qkv`, or where the heads are normed first, new queries and keys."""
    decoder = run.decoder
    if layer.q_norm is None or layer.k_norm is None:
        run.rotary.rotate_(_split_heads(decoder, qkv)[:, : decoder.num_heads + decoder.num_kv_heads])
        return _views(decoder, qkv)
    q, k, v = _split_heads(decoder, qkv).split((decoder.num_heads, decoder.num_kv_heads, decoder.num_kv_heads), dim=1)
    q = rms_norm(q, layer.q_norm, inverse_rms(q, layer.q_norm))
    k = rms_norm(k, layer.k_norm, inverse_rms(k, layer.k_norm))
    run.rotary.rotate_(q)
    run.rotary.rotate_(k)
    return HeadViews(*(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)))


def _heads_backward_(
    run: Pass, layer: DenseLayer, saved: Saved, d_qkv: torch.Tensor, gradients: GradientBuffers
) -> None:
    """Turns the gradient of the attention's input into the gradient of the projection's output, in place."""
    decoder, split = run.decoder, _split_heads(run.decoder, d_qkv)
    run.rotary.rotate_gradient_(split[:, : decoder.num_heads + decoder.num_kv_heads])
    projected, start = _split_heads(decoder, saved.qkv), 0
    for norm, num_heads in ((layer.q_norm, decoder.num_heads), (layer.k_norm, decoder.num_kv_heads)):
        if norm is None:
            return
        here = slice(start, start + num_heads)
        x, d_y = (t[:, here].reshape(-1, decoder.head_dim) for t in (projected, split))
        d_x = torch.zeros_like(d_y)
        gradients.add((norm.weight,), rms_norm_backward_(d_x, d_y.clone(), x, norm, inverse_rms(x, norm)))
        split[:, here].copy_(d_x.view(-1, num_heads, decoder.head_dim))
        start += num_heads


def _split_heads(decoder: DenseDecoder, qkv: torch.Tensor) -> torch.Tensor:
    return qkv.view(len(qkv), decoder.num_heads + 2 * decoder.num_kv_heads, decoder.head_dim)


def _views(decoder: DenseDecoder, qkv: torch.Tensor) -> HeadViews:
    whole = _split_heads(decoder, qkv).transpose(0, 1).unsqueeze(0)
    return HeadViews(*whole.split((decoder.num_heads, decoder.num_kv_heads, decoder.num_kv_heads), dim=1))


def _norm_and_projection_backward(
    run: Pass, normed: Normed, projection: Projection, d_y: torch.Tensor, d_x: torch.Tensor, gradients: GradientBuffers
) -> torch.Tensor:
    """Backward of projection(norm(x)), given its gradient `d_y`; adds the gradient of x to `d_x` and returns `d_x`."""
    norm, x, scale = normed.norm, normed.x, normed.scale
    d_y = run.matmul.operand(d_y)
    d_normed = run.matmul.input_gradient(d_y, projection.weight)
    if gradients.wants(weights_of(projection)):
        _add_weight_gradient(projection, d_y, rms_norm(x, norm, scale), run, gradients)
    gradients.add((norm.weight,), rms_norm_backward_(d_x, d_normed, x, norm, scale))
    return d_x


def _add_weight_gradient(
    projection: Projection, d_y: torch.Tensor, x: torch.Tensor, run: Pass, gradients: GradientBuffers
) -> None:
    gradients.add_matmul(weights_of(projection), d_y, x, run.matmul)
    if projection.bias is not None and gradients.wants(biases_of(projection)):
        gradients.add(biases_of(projection), d_y.sum(0, dtype=torch.promote_types(d_y.dtype, torch.float32)))


def weights_of(projection: Projection) -> tuple[nn.Parameter, ...]:
    return tuple(cast(nn.Parameter, part.weight) for part in projection.parts)


def biases_of(projection: Projection) -> tuple[nn.Parameter, ...]:
    return tuple(part.bias for part in projection.parts if part.bias is not None)


def parameters_of(layer: DenseLayer) -> tuple[nn.Parameter, ...]:
    """Every parameter of the layer."""
    norms = (layer.input_norm, layer.q_norm, layer.k_norm, layer.post_norm)
    projections = (layer.qkv, layer.o, layer.gate_up, layer.down)
    parameters = [norm.weight for norm in norms if norm is not None]
    for projection in projections:
        parameters.extend((*weights_of(projection), *biases_of(projection)))
    return tuple(parameters)
