"""The forward of a plain dense decoder with gradients, by the ops that the sampler computes with (pointwise.py).

It reads the module's own weights (verl.models.decoder.weights), so that projections of one input are one matrix product, and
has autograd.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from verl.models.attention import AttentionLayout, Scoring
from verl.models.decoder.weights import DenseDecoder, Norm, Projection
from verl.models.hf_module import AutogradContext
from verl.models.ops.pointwise import add_norm, rms_norm, rotated, swiglu
from verl.models.packing import PackedBatch
from verl.models.vision import ImageFeatures


def straight_states(
    decoder: DenseDecoder, packed: PackedBatch, checkpointing: bool = False, images: ImageFeatures | None = None
) -> torch.Tensor:
    """[predictions, hidden_size]: the normed hidden states at `packed.hidden_index`, differentiable in the weights and in the
    features of `images`. With `checkpointing` only the layers' inputs are kept, and the rest is computed again in the
    backward."""
    x = F.embedding(packed.input_ids[0], decoder.embed, decoder.padding_idx)
    if packed.noise is not None:
        x = x + packed.noise.to(x)
    if images is not None:
        x = images.embedded(x)
    cos, sin = decoder.rotary(x.unsqueeze(0), packed.position_ids)
    for index in range(len(decoder.layers)):
        run = partial(_layer, decoder, index, packed.layout, cos[0], sin[0])
        if checkpointing and torch.is_grad_enabled():
            x = checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)
        else:
            x = run(x)
        if images is not None:
            x = images.deepened(index, x)
    return _normed(x.index_select(0, packed.hidden_index), decoder.final_norm)


def _layer(
    decoder: DenseDecoder, index: int, layout: AttentionLayout, cos: torch.Tensor, sin: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    layer, heads, kv_heads = decoder.layers[index], decoder.num_heads, decoder.num_kv_heads
    qkv = _linear(_normed(x, layer.input_norm), layer.qkv).unflatten(-1, (heads + 2 * kv_heads, -1))
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = _normed(q, layer.q_norm), _normed(k, layer.k_norm)
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (rotated(q, cos, sin), rotated(k, cos, sin), v))
    attended = layout.attend(index, q, k, v, Scoring(decoder.scale, layer.sliding_window))
    out = _linear(attended[0].flatten(1), layer.o)
    middle, normed = add_norm(x, out, layer.post_norm.weight, layer.post_norm.eps)
    return middle + _linear(swiglu(_linear(normed, layer.gate_up)), layer.down)


def _normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    return rms_norm(x, norm.weight, norm.eps)


def _linear(x: torch.Tensor, projection: Projection) -> torch.Tensor:
    weights, biases = ([getattr(part, name) for part in projection.parts] for name in ("weight", "bias"))
    weight = _Joined.apply(projection.weight, *weights)
    return F.linear(x, weight, None if projection.bias is None else _Joined.apply(projection.bias, *biases))


class _Joined(torch.autograd.Function):
    """Parameters that lie back to back, as the tensor of which they are views."""

    @staticmethod
    def forward(ctx: AutogradContext, whole: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.sizes = [len(p) for p in parameters]
        return whole.detach()

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *grads[0].split(ctx.sizes))
