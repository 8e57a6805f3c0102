"""The forward of a dense decoder with gradients by autograd, with the ops that the sampler on a GPU computes with."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from verl.models.attention import Scoring
from verl.models.decoder.forward import DecoderPass, Sum, by_head, embedded
from verl.models.decoder.weights import DenseDecoder, DenseLayer, Projection
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

    def layer(self, number: int, weights: DenseLayer, x: torch.Tensor, delta: torch.Tensor | None) -> Sum:
        """See DecoderPass; the sum is made, since a checkpoint keeps the input of a layer."""
        run = partial(self._summed, number, weights)
        return (
            checkpoint(run, x, use_reentrant=False, preserve_rng_state=False) if self.checkpointing else run(x)
        ), None

    def _summed(self, number: int, weights: DenseLayer, x: torch.Tensor) -> torch.Tensor:
        x, delta = super().layer(number, weights, x, None)
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
        weights, biases = ([getattr(part, name) for part in projection.parts] for name in ("weight", "bias"))
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
