"""The forward of a decoder, for training and sampling on every device: one loop over its layers, and one layer.

    x -> norm -> q, k, v -> rotary -> attention -> o -> (+ x) = middle -> norm -> gate, up -> swiglu -> down -> (+ middle)
                                                                         norm -> router -> experts -> sum -> (+ middle)

    who                                             sum with x              products                 attention
    training on a CPU  decoder/backward.py          in the product          Matmul                   packed, kept on a tape
    training on a GPU  decoder/autograd.py          in the op of the norm   torch, with autograd     packed, with autograd
    sampling           rollout/native/torch         in place                Matmul and adapters      stores of the host
    sampling on a GPU  rollout/native/cuda          in the op of the norm   torch and adapters       stores on the device

On a CPU with the compiled kernels, one call of C samples with the same layers (rollout/native/compiled). Training runs on one
device, or under FSDP2 with a unit for each layer (decoder/weights.py). Ranks that divide tokens exchange them for heads in
attention (parallel/sequence.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from verl.models.decoder.weights import DenseDecoder, DenseLayer, Mixture, Norm, Projection
from verl.models.ops.experts import ExpertChoice, choose_experts, grouped_linear, weighted_sum
from verl.models.ops.pointwise import Turns, add_norm, rms_norm, swiglu
from verl.models.parallel.collectives import leave_group
from verl.models.parallel.experts import Places
from verl.models.routing import Routing
from verl.models.vision import ImageFeatures

Sum = tuple[torch.Tensor, torch.Tensor | None]  # (x, delta): x + delta, which the next norm computes; None: x


def embedded(
    decoder: DenseDecoder,
    ids: torch.Tensor,
    images: ImageFeatures | None = None,
    noise: torch.Tensor | None = None,
    lookup: Callable[..., torch.Tensor] = F.embedding,
) -> torch.Tensor:
    """The input [tokens, hidden_size] of the first layer, for token ids [tokens]."""
    if decoder.vocabulary is None:
        x = lookup(ids, decoder.embed, decoder.padding_idx)
    else:
        ids, elsewhere = decoder.vocabulary.here(ids)
        x = lookup(ids, decoder.embed, decoder.padding_idx).masked_fill(elsewhere.unsqueeze(1), 0.0)
        x = leave_group(x, decoder.vocabulary.group)
    if noise is not None:
        x = x + noise.to(x)
    return x if images is None else images.embedded(x)


class DecoderPass:
    """One forward over tokens that lie back to back.

    Weights are arguments of the layer: their owner passes them, be it a module, a unit of FSDP or an adapter's projection.
    Routers of experts follow the choices of `routing`, if given, or record theirs there."""

    routing: Routing | None = None

    def states(self, decoder: DenseDecoder, x: torch.Tensor, images: ImageFeatures | None = None) -> Sum:
        """The output [tokens, hidden_size] of the last layer."""
        delta = None
        for number, weights in enumerate(decoder.layers):
            x, delta = self.layer(number, weights, x, delta)
            if images is not None and number < len(images.deep):
                x, delta = self.deepened(images, number, x if delta is None else x + delta), None
        return x, delta

    def deepened(self, images: ImageFeatures, number: int, x: torch.Tensor) -> torch.Tensor:
        """The output `x` of a layer with the features that are added to it."""
        return images.deepened(number, x)

    def layer(self, number: int, weights: DenseLayer, x: torch.Tensor, delta: torch.Tensor | None) -> Sum:
        """The output of a layer for its input x + delta, all [tokens, hidden_size]."""
        return self.feed_forward(weights, *self.attention(number, weights, x, delta))

    def attention(self, number: int, weights: DenseLayer, x: torch.Tensor, delta: torch.Tensor | None) -> Sum:
        """The first half of a layer."""
        x, normed = self.normed(x, delta, weights.input_norm)
        return self.project(x, self.attend(number, weights, self.linear(normed, weights.qkv)), weights.o)

    def feed_forward(self, weights: DenseLayer, x: torch.Tensor, delta: torch.Tensor | None) -> Sum:
        """The second half of a layer."""
        x, normed = self.normed(x, delta, weights.post_norm)
        if weights.mixture is not None:
            return x, self.mixed(weights.mixture, normed)
        return self.project(x, self.activated(self.linear(normed, weights.gate_up)), weights.down)

    def mixed(self, mixture: Mixture, x: torch.Tensor) -> torch.Tensor:
        """The output of a mixture of experts, [tokens, hidden_size] as its input."""
        choice, places = self.routed(mixture, x)
        out = self.by_experts(mixture, places.to_experts(x), places.ends)
        y, shared = weighted_sum(places.from_experts(out), choice.weights), mixture.shared
        if shared is None:
            return y
        part = self.linear(self.activated(self.linear(x, shared.gate_up)), shared.down)
        return y + part * self.linear(x, shared.gate).sigmoid()

    def routed(self, mixture: Mixture, x: torch.Tensor) -> tuple[ExpertChoice, Places]:
        """The experts of tokens, and the order in which these compute."""

        def follow(experts: torch.Tensor) -> torch.Tensor:
            return experts if self.routing is None else self.routing.choose(mixture.layer, experts)

        choice = choose_experts(self.router_logits(x, mixture.router), mixture.num_chosen, mixture.normalizes, follow)
        return choice, Places(choice.experts, len(mixture.router), mixture.group)

    def router_logits(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden_size] -> [tokens, experts]."""
        return F.linear(x, weight)

    def by_experts(self, mixture: Mixture, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """The outputs of experts for `rows`, both [rows, hidden_size] and sorted by expert; see grouped_linear."""
        gate_up = grouped_linear(rows, mixture.gate_up, ends)
        return grouped_linear(self.activated(gate_up), mixture.down, ends)

    def normed(self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        """(x + delta, its RMS norm)."""
        if delta is None:
            return x, rms_norm(x, norm.weight, norm.eps)
        return add_norm(x, delta, norm.weight, norm.eps)

    def linear(self, x: torch.Tensor, projection: Projection) -> torch.Tensor:
        """x [tokens, inputs] -> [tokens, outputs]."""
        raise NotImplementedError

    def project(self, x: torch.Tensor, inputs: torch.Tensor, projection: Projection) -> Sum:
        """x plus the product of `inputs`."""
        return x, self.linear(inputs, projection)

    def activated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """SwiGLU, [tokens, 2 * width] -> [tokens, width]."""
        return swiglu(gate_up)

    def attend(self, number: int, weights: DenseLayer, qkv: torch.Tensor) -> torch.Tensor:
        """Attention [tokens, heads * head_dim] of layer `number`, for its joined queries, keys and values."""
        raise NotImplementedError


def by_head(decoder: DenseDecoder, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of joined projections: queries [tokens, heads, head_dim], keys and values [tokens, kv_heads, head_dim]."""
    heads, kv_heads = decoder.num_heads, decoder.num_kv_heads
    q, k, v = qkv.view(len(qkv), heads + 2 * kv_heads, decoder.head_dim).split((heads, kv_heads, kv_heads), dim=1)
    return q, k, v


def turned_heads(
    decoder: DenseDecoder,
    weights: DenseLayer,
    qkv: torch.Tensor,
    turns: Turns,
    normed: Callable[[torch.Tensor, Norm], torch.Tensor],
    rotate_: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values as `by_head`, rotated: in place, or if heads are normed, in the results of `normed`."""
    q, k, v = by_head(decoder, qkv)
    if weights.q_norm is None or weights.k_norm is None:
        num_turned = decoder.num_heads + decoder.num_kv_heads
        rotate_(qkv.view(len(qkv), -1, decoder.head_dim)[:, :num_turned], turns.cos, turns.turn)
        return q, k, v
    q, k = normed(q, weights.q_norm), normed(k, weights.k_norm)
    rotate_(q, turns.cos, turns.turn)
    rotate_(k, turns.cos, turns.turn)
    return q, k, v
