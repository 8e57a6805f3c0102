"""The forward of a dense decoder with gradients by autograd, with the ops that the sampler on a GPU computes with."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from verl.models.decoder.adapted import adapted
from verl.models.decoder.forward import DecoderPass, Sum, by_head, embedded, turns_of
from verl.models.decoder.kept import HostInputs, Recipe, computed_again, copy_stream
from verl.models.decoder.layers import DenseLayer, Mixture, Norm
from verl.models.decoder.mixture import WeightedDown
from verl.models.decoder.projection import Projection
from verl.models.decoder.weights import DenseDecoder, Layer
from verl.models.hf_module import AutogradContext
from verl.models.memory import Recompute
from verl.models.ops.experts import ExpertChoice, grouped_linear
from verl.models.ops.pointwise import Turns, rms_norm
from verl.models.packed import as_heads
from verl.models.packing import PackedBatch
from verl.models.parallel.collectives import enter_group, leave_group
from verl.models.parallel.experts import Places
from verl.models.vision import ImageFeatures


def straight_states(
    decoder: DenseDecoder,
    packed: PackedBatch,
    recompute: Recompute = "none",
    images: ImageFeatures | None = None,
    offloads: bool = False,
) -> torch.Tensor:
    """[predictions, hidden_size]: the normed hidden states at `packed.hidden_index`, differentiable in the weights and in the
    features of `images`. The backward computes again what `recompute` names: "full" layers, of which only the inputs are kept,
    or "selective" norms, rotary embedding and SwiGLU. With `offloads` inputs of layers that are kept wait on the host."""
    x = embedded(decoder, packed.input_ids[0], images, packed.noise)
    run = _AutogradPass(decoder, packed, x, recompute, offloads)
    x, _ = run.states(x, images)
    return run.normed(x.index_select(0, packed.hidden_index), None, decoder.final_norm)[1]


class _AutogradPass(DecoderPass):
    def __init__(
        self, decoder: DenseDecoder, packed: PackedBatch, x: torch.Tensor, recompute: Recompute, offloads: bool
    ):
        super().__init__(decoder)
        self.layout, self.routing = packed.layout, packed.layout.routing
        self.recompute = recompute if torch.is_grad_enabled() else "none"
        stream = copy_stream(x.device) if offloads and self.recompute == "full" else None
        self._inputs = HostInputs(len(decoder.layers), stream) if stream is not None else None
        self._next: tuple[torch.Tensor, Recipe] | None = None  # the input of the next product
        self._of_mixture: Recipe  # of the input of a mixture
        self.turns = turns_of(decoder, x, packed.position_ids)

    def layer(self, number: int, weights: Layer, x: torch.Tensor, delta: torch.Tensor | None) -> Sum:
        """See DecoderPass; the sum is made, since a checkpoint keeps the input of a layer."""
        return weights.call(self._checkpointed, number, x), None

    def _checkpointed(self, number: int, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        run = partial(self._summed, number, layer)
        if self.recompute != "full":
            return run(x)
        with self._inputs.of(number) if self._inputs is not None else nullcontext():
            out: torch.Tensor = checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)
        return out

    def _summed(self, number: int, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        if layer.feed is None:
            return _sum(*super().layer(number, layer.gathered(), x, None))
        return layer.feed.call(self._fed, number, _sum(*self.attention(number, layer.gathered(), x, None)))

    def _fed(self, number: int, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        return _sum(*self.feed_forward(layer.gathered(), x, None))

    def normed(self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        """See DecoderPass."""
        x, normed = super().normed(x, delta, norm)
        self._next = normed, partial(rms_norm, x.detach(), norm.factor.detach(), norm.eps)
        return x, normed

    def activated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See DecoderPass."""
        activated = super().activated(gate_up)
        self._next = activated, partial(super().activated, gate_up.detach())
        return activated

    def feed_forward(self, weights: DenseLayer, x: torch.Tensor, delta: torch.Tensor | None) -> Sum:
        """See DecoderPass; in chunks if the layout says so, each computed again in the backward. Mixtures stay undivided."""
        size = self.layout.chunk_tokens
        if size is None or size >= len(x) or weights.mixture is not None:
            return super().feed_forward(weights, x, delta)
        run, x = partial(self._chunk, weights), _sum(x, delta)
        if torch.is_grad_enabled():
            run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
        return torch.cat([run(part) for part in x.split(size)]), None

    def _chunk(self, weights: DenseLayer, x: torch.Tensor) -> torch.Tensor:
        return _sum(*super().feed_forward(weights, x, None))

    def mixed(self, mixture: Mixture, x: torch.Tensor) -> torch.Tensor:
        """See DecoderPass. Several products read `x`."""
        recipe, self._next = self._next, None
        assert recipe is not None
        self._of_mixture = recipe[1]
        with self._keeping(recipe):
            return super().mixed(mixture, x)

    def wide_logits(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See DecoderPass. A copy in float32 would be twice as large as `x`, which other products keep."""
        wide = torch.promote_types(x.dtype, torch.float32)
        if wide == x.dtype or self.recompute == "full":
            return super().wide_logits(x, weight)
        again = self._of_mixture if self.recompute == "selective" else x.detach
        rows = x.to(wide)
        with computed_again((rows, lambda: again().to(wide))):
            return F.linear(rows, weight.to(wide))

    def summed_experts(self, mixture: Mixture, x: torch.Tensor, choice: ExpertChoice, places: Places) -> torch.Tensor:
        """See DecoderPass."""
        rows, input_again = places.to_experts(x), self._of_mixture
        # rows that other ranks have sent stay
        again = [] if places.exchanges else [(rows, lambda: places.to_experts(input_again()))]
        with self._keeping(*again):
            gate_up = grouped_linear(rows, mixture.gate_up, places.ends)
        activated = self.activated(gate_up)
        recipe, self._next = self._next, None
        assert recipe is not None
        with self._keeping(recipe):
            y: torch.Tensor = WeightedDown.apply(activated, choice.weights, mixture.down, places)
        return y

    def attend(self, number: int, weights: DenseLayer, qkv: torch.Tensor) -> torch.Tensor:
        """See DecoderPass."""
        turned, scoring = self.turns[weights.rotary], self.decoder.scoring(weights)
        if weights.latent is not None:
            q, k, v = self.latent_heads(weights.latent, qkv, turned)
            return self.layout.attend(number, as_heads(q), as_heads(k), as_heads(v), scoring)[0].flatten(1)
        q, k, v = by_head(self.decoder, qkv)
        recipes = [(x, partial(_turned, turned, norm=norm)) for x, norm in ((q, weights.q_norm), (k, weights.k_norm))]
        q, k = (recipe(x) for x, recipe in recipes)
        again = [(new, partial(recipe, x.detach())) for new, (x, recipe) in zip((q, k), recipes, strict=True)]
        with self._keeping(*again):
            return self.layout.attend(number, as_heads(q), as_heads(k), as_heads(v), scoring)[0].flatten(1)

    def linear(self, x: torch.Tensor, projection: Projection) -> torch.Tensor:
        """See DecoderPass."""
        recipe, self._next = self._next, None
        with self._keeping(*([recipe] if recipe is not None and recipe[0] is x else [])):
            if projection.inputs_group is not None:
                x = enter_group(x, projection.inputs_group)
            y = adapted(self._product(x, projection), x, projection)
        if projection.outputs_group is None:
            return y
        y = leave_group(y, projection.outputs_group)
        return y if projection.bias is None else y + projection.parts[0].bias

    def _keeping(self, *recipes: tuple[torch.Tensor, Recipe]) -> AbstractContextManager[None]:
        return computed_again(*recipes) if recipes and self.recompute == "selective" else nullcontext()

    def _product(self, x: torch.Tensor, projection: Projection) -> torch.Tensor:
        weights = [cast(nn.Parameter, part.weight) for part in projection.parts]
        biases = [part.bias for part in projection.parts if part.bias is not None]
        if not projection.is_joined and len(weights) > 1:
            out: torch.Tensor = _Copied.apply(x, projection, *weights, *biases)
            return out
        weight = _Joined.apply(projection.weight, *weights)
        has_bias = projection.bias is not None and projection.outputs_group is None  # else it is added to the sum
        return F.linear(x, weight, _Joined.apply(projection.bias, *biases) if has_bias else None)


def _turned(turns: Turns, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    return turns.rotated(x if norm is None else rms_norm(x, norm.factor, norm.eps))


def _sum(x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
    return x if delta is None else x + delta


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
