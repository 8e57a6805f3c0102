"""Activations of the halves of a layer, which a pass with a backward by hand keeps, and the parameters of each half."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import nn

from verl.models.decoder.adapted import parameters_of
from verl.models.decoder.layers import DenseLayer, Norm
from verl.models.decoder.mixture import SavedMixture
from verl.models.decoder.projection import Projection
from verl.models.grad_buffers import GradientBuffers
from verl.models.hf_module import AutogradContext
from verl.models.ops.pointwise import inverse_rms, rms_norm_backward_, scaled_norm
from verl.models.packed import Attended, HeadViews


class Normed(NamedTuple):
    """A norm, its input, and the inverse RMS of the input."""

    norm: Norm
    x: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor, norm: Norm) -> Normed:
        """`norm` of x [tokens, ...]."""
        return cls(norm, x, inverse_rms(x, norm.eps))

    def out(self) -> torch.Tensor:
        return scaled_norm(self.x, self.norm.factor, self.scale)

    def backward_(self, d_out: torch.Tensor, d_x: torch.Tensor, gradients: GradientBuffers) -> torch.Tensor:
        """Adds the gradient of the input to `d_x`, given the result's gradient, which is overwritten; returns `d_x`."""
        d_weight = rms_norm_backward_(d_x, d_out, self.x, self.norm.factor, self.scale)
        gradients.add((self.norm.weight,), d_weight)
        return d_x


class SavedAttention(NamedTuple):
    """Activations of the first half of a layer, all [tokens, ...], in the order of the forward."""

    x: Normed
    qkv: torch.Tensor  # rotated, unless the heads are normed: then as projected
    latent: tuple[Normed, ...]  # norms of narrow vectors
    heads: HeadViews | None  # None: computed again
    attended: Attended
    after: Normed | None  # the norm of what is added to the input


class SavedFeed(NamedTuple):
    """Activations of the second half of a layer."""

    middle: Normed
    gate_up: torch.Tensor | SavedMixture | None  # None: computed in chunks, and so again
    after: Normed | None = None  # as above; None in chunks


class Saved(NamedTuple):
    """Activations of the halves of a layer; None: the half is another part of the pass."""

    attention: SavedAttention | None
    feed: SavedFeed | None


Halves = Literal["both", "attention", "feed"]


def parameters_of_halves(weights: DenseLayer, halves: Halves) -> list[nn.Parameter]:
    norms, products, parameters = list[Norm | None](), list[Projection](), list[nn.Parameter]()
    if halves != "feed":
        norms += weights.input_norm, weights.q_norm, weights.k_norm, weights.attention_norm
        norms += () if weights.latent is None else weights.latent.norms
        products += weights.qkv, *(() if weights.latent is None else weights.latent.projections), weights.o
    if halves != "attention":
        norms += weights.post_norm, weights.feed_norm
        products += (weights.gate_up, weights.down) if weights.mixture is None else weights.mixture.projections
        parameters += [] if weights.mixture is None else weights.mixture.parameters
    parameters += [norm.weight for norm in norms if norm is not None]
    return parameters + [p for projection in products for p in parameters_of(projection)]


Backward = Callable[[torch.Tensor, GradientBuffers], torch.Tensor | None]


class PassPart(torch.autograd.Function):
    """A part of a pass, with its backward by hand: `forward(x)` gives (output, the function of the backward), which is called
    with the output's gradient and buffers, and returns the input's gradient."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        gradients: GradientBuffers | None,
        forward: Callable[[torch.Tensor], tuple[torch.Tensor, Backward]],
        x: torch.Tensor,
        *trained: torch.Tensor,
    ) -> torch.Tensor:
        ctx.gradients, ctx.trained = gradients, trained
        out, ctx.through = forward(x.detach())
        return out

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        through, gradients, trained, ctx.through, ctx.trained = ctx.through, ctx.gradients, ctx.trained, None, ()
        if through is None:
            raise RuntimeError("The activations of this forward are used up: its backward runs once.")
        into = GradientBuffers.apart(trained) if gradients is None else gradients
        d_x = through(grads[0], into)
        return (None, None, d_x, *(into.take(p) if gradients is None else None for p in trained))
