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

from collections.abc import Callable

import torch
import torch.nn.functional as F

from verl.models.decoder.layers import DenseLayer, Latent, Mixture, Norm
from verl.models.decoder.projection import Projection
from verl.models.decoder.weights import DenseDecoder
from verl.models.ops.experts import ExpertChoice, choose_experts, grouped_linear, weighted_sum
from verl.models.ops.pointwise import ACTIVATIONS, Turns, add_norm, rms_norm
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
    if decoder.embed_scale is not None:
        x = x * decoder.embed_scale.to(x.dtype)
    if noise is not None:
        x = x + noise.to(x)
    return x if images is None else images.embedded(x)


def turns_of(decoder: DenseDecoder, x: torch.Tensor, positions: torch.Tensor) -> dict[str | None, Turns]:
    """The rotary embeddings by the `rotary` of layers, for tokens x [tokens, hidden_size]; positions as of `decoder.rotary`."""
    tables = (
        {None: decoder.rotary(x.unsqueeze(0), positions)}
        if not decoder.rotaries
        else {name: decoder.rotary(x.unsqueeze(0), positions, name) for name in decoder.rotaries}
    )
    return {name: Turns(cos[0], sin[0], decoder.pairs) for name, (cos, sin) in tables.items()}


class DecoderPass:
    """One forward over tokens that lie back to back.

    Weights are arguments of the layer: their owner passes them, be it a module, a unit of FSDP or an adapter's projection.
    Routers of experts follow the choices of `routing`, if given, or record theirs there."""

    routing: Routing | None = None

    def __init__(self, decoder: DenseDecoder):
        self.decoder, self.activation = decoder, ACTIVATIONS[decoder.activation]

    def states(self, x: torch.Tensor, images: ImageFeatures | None = None) -> Sum:
        """The output [tokens, hidden_size] of the last layer."""
        delta = None
        for number, weights in enumerate(self.decoder.layers):
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
        attended = self.attend(number, weights, self.linear(normed, weights.qkv))
        return self.project(x, attended, weights.o, weights.attention_norm)

    def feed_forward(self, weights: DenseLayer, x: torch.Tensor, delta: torch.Tensor | None) -> Sum:
        """The second half of a layer."""
        x, normed = self.normed(x, delta, weights.post_norm)
        if weights.mixture is not None:
            return x, self.mixed(weights.mixture, normed)
        activated = self.activated(self.linear(normed, weights.gate_up))
        return self.project(x, activated, weights.down, weights.feed_norm)

    def mixed(self, mixture: Mixture, x: torch.Tensor) -> torch.Tensor:
        """The output of a mixture of experts, [tokens, hidden_size] as its input."""
        choice, places = self.routed(mixture, x)
        y, shared = self.summed_experts(mixture, x, choice, places), mixture.shared
        if mixture.summed is not None and mixture.group is not None:
            y = leave_group(y, mixture.group)
        if shared is None:
            return y
        part = self.linear(self.activated(self.linear(x, shared.gate_up)), shared.down)
        return y + (part if shared.gate is None else part * self.linear(x, shared.gate).sigmoid())

    def routed(self, mixture: Mixture, x: torch.Tensor) -> tuple[ExpertChoice, Places]:
        """The experts of tokens, and the order in which these compute."""

        def follow(experts: torch.Tensor) -> torch.Tensor:
            return experts if self.routing is None else self.routing.choose(mixture.layer, experts)

        logits = (self.wide_logits if mixture.rule.sigmoid else self.router_logits)(x, mixture.router)
        choice = choose_experts(logits, mixture.rule, follow)
        return choice, Places(choice.experts, len(mixture.router), None if mixture.summed else mixture.group)

    def router_logits(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden_size] -> [tokens, experts]."""
        return F.linear(x, weight)

    def wide_logits(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """As router_logits, in float32 or wider: transformers computes the logits of sigmoids there."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(wide), weight.to(wide))

    def summed_experts(self, mixture: Mixture, x: torch.Tensor, choice: ExpertChoice, places: Places) -> torch.Tensor:
        """The weighted sums of the outputs of tokens' experts."""
        out = self.by_experts(mixture, places.to_experts(x), places.ends)
        return weighted_sum(places.from_experts(out), choice.weights)

    def by_experts(self, mixture: Mixture, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """The outputs of experts for `rows`, both [rows, hidden_size] and sorted by expert; see grouped_linear."""
        gate_up = grouped_linear(rows, mixture.gate_up, ends)
        return grouped_linear(self.activated(gate_up), mixture.down, ends)

    def normed(self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        """(x + delta, its RMS norm)."""
        if delta is None:
            return x, rms_norm(x, norm.factor, norm.eps)
        return add_norm(x, delta, norm.factor, norm.eps)

    def linear(self, x: torch.Tensor, projection: Projection) -> torch.Tensor:
        """x [tokens, inputs] -> [tokens, outputs]."""
        raise NotImplementedError

    def project(self, x: torch.Tensor, inputs: torch.Tensor, projection: Projection, norm: Norm | None) -> Sum:
        """x plus the product of `inputs`, or the product's `norm`."""
        y = self.linear(inputs, projection)
        return x, y if norm is None else self.normed(y, None, norm)[1]

    def activated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """The gated activation, [tokens, 2 * width] -> [tokens, width]."""
        return self.activation.gated(gate_up)

    def attend(self, number: int, weights: DenseLayer, qkv: torch.Tensor) -> torch.Tensor:
        """Attention [tokens, heads * value_dim] of layer `number`, for its joined queries, keys and values."""
        raise NotImplementedError

    def latent_heads(
        self, latent: Latent, qkv: torch.Tensor, turns: Turns
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries and keys [tokens, heads, head_dim], rotated, and values [tokens, heads, value_dim]."""
        q, kv, k_turned = latent.parts(qkv)
        if latent.q_norm is not None and latent.q_up is not None:
            q = self.linear(self.normed(q, None, latent.q_norm)[1], latent.q_up)
        kv = self.linear(self.normed(kv, None, latent.kv_norm)[1], latent.kv_up)
        q, kv = (x.unflatten(1, (self.decoder.num_heads, -1)) for x in (q, kv))
        q, q_turned = q.split((latent.plain, latent.rotated), dim=2)
        k, v = kv.split((latent.plain, latent.value), dim=2)
        k_turned = turns.rotated(k_turned.unsqueeze(1)).expand(-1, self.decoder.num_heads, -1)
        return torch.cat([q, turns.rotated(q_turned)], dim=2), torch.cat([k, k_turned], dim=2), v


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values as `by_head`, rotated: in place, or if heads are normed, in the results of `normed`."""
    q, k, v = by_head(decoder, qkv)
    if weights.q_norm is None or weights.k_norm is None:
        num_turned = decoder.num_heads + decoder.num_kv_heads
        turns.rotate_(qkv.view(len(qkv), -1, decoder.head_dim)[:, :num_turned])
        return q, k, v
    q, k = normed(q, weights.q_norm), normed(k, weights.k_norm)
    turns.rotate_(q)
    turns.rotate_(k)
    return q, k, v
