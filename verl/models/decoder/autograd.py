"""The forward of a dense decoder with gradients by autograd, with the ops that the sampler on a GPU computes with."""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from verl.models.attention import Scoring
from verl.models.decoder.adapted import adapted
from verl.models.decoder.forward import DecoderPass, Sum, by_head, embedded
from verl.models.decoder.weights import DenseDecoder, DenseLayer, Layer, Projection
from verl.models.hf_module import AutogradContext
from verl.models.ops.pointwise import rotated
from verl.models.packing import PackedBatch
from verl.models.vision import ImageFeatures


def straight_states(
    decoder: DenseDecoder, packed: PackedBatch, checkpointing: bool = False, images: ImageFeatures | None = None
) -> torch.Tensor:
    """[predictions, hidden_size]: the normed hidden states at `packed.hidden_index`, differentiable in the weights and in the
    features of `images`. With `checkpointing` only the layers' inputs are kept, and the backward computes the layers again."""
    x = embedded(decoder, packed.input_ids[0], images, packed.noise)
    run = _AutogradPass(decoder, packed, x, checkpointing)
    x, _ = run.states(decoder, x, images)
    return run.normed(x.index_select(0, packed.hidden_index), None, decoder.final_norm)[1]


class _AutogradPass(DecoderPass):
    def __init__(self, decoder: DenseDecoder, packed: PackedBatch, x: torch.Tensor, checkpointing: bool):
        self.decoder, self.layout = decoder, packed.layout
        self.checkpointing = checkpointing and torch.is_grad_enabled()
        cos, sin = decoder.rotary(x.unsqueeze(0), packed.position_ids)
        self.cos, self.sin = cos[0], sin[0]

    def layer(self, number: int, weights: Layer, x: torch.Tensor, delta: torch.Tensor | None) -> Sum:
        """See DecoderPass; the sum is made, since a checkpoint keeps the input of a layer."""
        return weights.call(self._checkpointed, number, x), None

    def _checkpointed(self, number: int, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        run = partial(self._summed, number, layer)
        out: torch.Tensor = (
            checkpoint(run, x, use_reentrant=False, preserve_rng_state=False) if self.checkpointing else run(x)
        )
        return out

    def _summed(self, number: int, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        x, delta = super().layer(number, layer.gathered(), x, None)
        return x if delta is None else x + delta

    def attend(self, number: int, weights: DenseLayer, qkv: torch.Tensor) -> torch.Tensor:
        """See DecoderPass."""
        q, k, v = by_head(self.decoder, qkv)
        if weights.q_norm is not None and weights.k_norm is not None:
            (_, q), (_, k) = self.normed(q, None, weights.q_norm), self.normed(k, None, weights.k_norm)
        turned = rotated(q, self.cos, self.sin), rotated(k, self.cos, self.sin), v
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in turned)
        return self.layout.attend(number, q, k, v, Scoring(self.decoder.scale, weights.sliding_window))[0].flatten(1)

    def linear(self, x: torch.Tensor, projection: Projection) -> torch.Tensor:
        """See DecoderPass."""
        return adapted(self._product(x, projection), x, projection)

    def _product(self, x: torch.Tensor, projection: Projection) -> torch.Tensor:
        weights = [cast(nn.Parameter, part.weight) for part in projection.parts]
        biases = [part.bias for part in projection.parts if part.bias is not None]
        if not projection.is_joined and len(weights) > 1:
            out: torch.Tensor = _Copied.apply(x, projection, *weights, *biases)
            return out
        weight = _Joined.apply(projection.weight, *weights)
        return F.linear(x, weight, None if projection.bias is None else _Joined.apply(projection.bias, *biases))


class _Joined(torch.autograd.Function):
    """Parameters that lie back to back, as the tensor of which they are views."""

    @staticmethod
    def forward(ctx: AutogradContext, joined: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.sizes = [len(p) for p in parameters]
        return joined.detach()

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *grads[0].split(ctx.sizes))


class _Copied(torch.autograd.Function):
    """The product of x [tokens, inputs] and parameters whose joined form is a copy, which is made again in the backward: kept,
    the copies would be as large as the model."""

    @staticmethod
    def forward(
        ctx: AutogradContext, x: torch.Tensor, projection: Projection, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.sizes = [len(part.weight) for part in projection.parts]
        ctx.save_for_backward(x, *parameters)
        return F.linear(x, projection.weight, projection.bias)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (d_y,), (x, *parameters), sizes = grads, ctx.saved_tensors, ctx.sizes
        weights, biases = parameters[: len(sizes)], parameters[len(sizes) :]
        d_weights, needs = [None] * len(sizes), ctx.needs_input_grad
        d_x = d_y @ torch.cat(weights) if needs[0] else None
        if any(needs[2 : 2 + len(sizes)]):
            d_weights = (d_y.t() @ x).split(sizes)
        return d_x, None, *d_weights, *(d_y.sum(0).split(sizes) if biases else ())
