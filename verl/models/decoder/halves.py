"""Activations of the halves of a layer, which a pass with a backward by hand keeps, and the parameters of each half."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import nn

from verl.models.decoder.adapted import parameters_of
from verl.models.decoder.mixture import SavedMixture
from verl.models.decoder.weights import DenseLayer, Norm, Projection
from verl.models.grad_buffers import GradientBuffers
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
        return scaled_norm(self.x, self.norm.weight, self.scale)

    def backward_(self, d_out: torch.Tensor, d_x: torch.Tensor, gradients: GradientBuffers) -> torch.Tensor:
        """Adds the gradient of the input to `d_x`, given the result's gradient, which is overwritten; returns `d_x`."""
        d_weight = rms_norm_backward_(d_x, d_out, self.x, self.norm.weight, self.scale)
        gradients.add((self.norm.weight,), d_weight)
        return d_x


class SavedAttention(NamedTuple):
    """Activations of the first half of a layer, all [tokens, ...], in the order of the forward."""

    x: Normed
    qkv: torch.Tensor  # rotated, unless the heads are normed: then as projected
    heads: HeadViews | None  # None: computed again
    attended: Attended


class SavedFeed(NamedTuple):
    """Activations of the second half of a layer."""

    middle: Normed
    gate_up: torch.Tensor | SavedMixture | None  # None: computed in chunks, and so again


class Saved(NamedTuple):
    """Activations of the halves of a layer; None: the half is another part of the pass."""

    attention: SavedAttention | None
    feed: SavedFeed | None


Halves = Literal["both", "attention", "feed"]


def parameters_of_halves(weights: DenseLayer, halves: Halves) -> list[nn.Parameter]:
    norms, products, parameters = list[Norm | None](), list[Projection](), list[nn.Parameter]()
    if halves != "feed":
        norms += weights.input_norm, weights.q_norm, weights.k_norm
        products += weights.qkv, weights.o
    if halves != "attention":
        norms.append(weights.post_norm)
        products += (weights.gate_up, weights.down) if weights.mixture is None else weights.mixture.projections
        parameters += [] if weights.mixture is None else weights.mixture.parameters
    parameters += [norm.weight for norm in norms if norm is not None]
    return parameters + [p for projection in products for p in parameters_of(projection)]
