"""The forward of a dense decoder on a CPU, with a backward by hand.

Kept from forward to backward are layer inputs, results of products and the attention's output. Norms and SwiGLU are computed
again, which costs less than keeping them. The backward overwrites the kept tensors. It writes the gradients of the weights into
the buffers that it is given, and returns them to autograd only if it is given none.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import nn

from verl.models.attention import Scoring
from verl.models.decoder.forward import DecoderPass, Sum, by_head, embedded, turned_heads
from verl.models.decoder.reuse import RecordedBatch, is_equal
from verl.models.decoder.weights import DenseDecoder, DenseLayer, Norm, Projection
from verl.models.grad_buffers import GradientBuffers
from verl.models.hf_module import AutogradContext
from verl.models.ops.linear import Matmul
from verl.models.ops.pointwise import (
    Turns,
    inverse_rms,
    rms_norm_backward_,
    rotate_,
    scaled_norm,
    swiglu_backward_,
)
from verl.models.packed import Attended, HeadViews, attend_backward, attend_packed
from verl.models.packing import PackedBatch
from verl.models.vision import ImageFeatures


def dense_hidden_states(
    decoder: DenseDecoder,
    packed: PackedBatch,
    gradients: GradientBuffers | None = None,
    checkpointing: bool = False,
    images: ImageFeatures | None = None,
    recorded: RecordedBatch | None = None,
) -> torch.Tensor:
    """[predictions, hidden_size]: the normed hidden states at `packed.hidden_index`.

    Differentiable once, in the weights and in the features of `images`. With `gradients` the weights' gradients are summed
    there; without, autograd gets them. With `checkpointing` only the layers' inputs are kept, and the backward computes the
    layers again. Nothing is kept if activations are `recorded`, which take the place of the forward.
    """
    trained = [p for p in _parameters(decoder) if p.requires_grad]
    features = () if images is None else (images.values, *images.deep)
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in (*trained, *features)):
        with torch.no_grad():
            return TrainingPass(decoder, packed, images).forward()
    if recorded is not None and not recorded.store.is_checked:  # once a run
        with torch.no_grad():
            passes = (TrainingPass(decoder, packed, None, recorded=x) for x in (None, recorded))
            recorded = recorded if is_equal(recorded, *(run.forward() for run in passes)) else None
    lowest = 0 if any(x.requires_grad for x in features) else _lowest_trained(decoder)
    run = TrainingPass(decoder, packed, images, lowest, checkpointing, recorded)
    hidden: torch.Tensor = _Differentiated.apply(run, gradients, len(features), *features, *trained)
    return hidden


class _Differentiated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        run: TrainingPass,
        gradients: GradientBuffers | None,
        num_features: int,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        ctx.run, ctx.gradients, ctx.trained = run, gradients, tensors[num_features:]
        return run.forward()

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        run, gradients, trained, ctx.run, ctx.trained = ctx.run, ctx.gradients, ctx.trained, None, ()
        if run is None:
            raise RuntimeError("The activations of this forward are used up: its backward runs once.")
        into = GradientBuffers.apart(trained) if gradients is None else gradients
        d_features = run.backward(grads[0], into)
        d_weights = (into.take(p) if gradients is None else None for p in trained)
        return (None, None, None, *d_features, *d_weights)


class Normed(NamedTuple):
    """A norm, its input, and the inverse RMS of the input."""

    norm: Norm
    x: torch.Tensor
    scale: torch.Tensor

    def out(self) -> torch.Tensor:
        return scaled_norm(self.x, self.norm.weight, self.scale)


class Saved(NamedTuple):
    """Activations of one layer, all [tokens, ...], in the order of the forward."""

    x: Normed
    qkv: torch.Tensor  # rotated, unless the heads are normed: then as projected
    heads: HeadViews
    attended: Attended
    middle: Normed
    gate_up: torch.Tensor | None  # None: computed in chunks, and so again


class TrainingPass(DecoderPass):
    """A forward over a packed batch, and its backward. It keeps the activations of layers from `lowest` on."""

    def __init__(
        self,
        decoder: DenseDecoder,
        packed: PackedBatch,
        images: ImageFeatures | None,
        lowest: int | None = None,
        checkpointing: bool = False,
        recorded: RecordedBatch | None = None,
    ):
        self.decoder, self.packed, self.images, self.recorded = decoder, packed, images, recorded
        self.layout, self.checkpointing = packed.layout, checkpointing
        self.lowest = len(decoder.layers) if lowest is None else lowest
        self.matmul = Matmul(decoder.embed.dtype, decoder.embed.device)
        self.saved: dict[int, Saved | torch.Tensor] = {}  # of a layer; only its input when checkpointing
        self._tape: list[Any] | None = None  # the fields of Saved, in a layer whose activations are kept

    def forward(self) -> torch.Tensor:
        """See `dense_hidden_states`."""
        decoder, packed = self.decoder, self.packed
        x = embedded(decoder, packed.input_ids[0], self.images, packed.noise)
        cos, sin = decoder.rotary(x.unsqueeze(0), packed.position_ids)
        self.turns = Turns(cos[0], sin[0])
        if self.recorded is not None:
            self.last = self.recorded.outputs(packed.hidden_index)
        else:
            self.last = self.states(decoder, x, self.images)[0].index_select(0, packed.hidden_index)
        return _normed(self.last, decoder.final_norm).out()

    def layer(self, number: int, weights: DenseLayer, x: torch.Tensor, delta: torch.Tensor | None) -> Sum:
        """See DecoderPass."""
        if number < self.lowest:
            return super().layer(number, weights, x, delta)
        if self.checkpointing:
            self.saved[number] = x
            return super().layer(number, weights, x, delta)
        out, self.saved[number] = self._with_saved(number, weights, x)
        return out

    def _with_saved(self, number: int, weights: DenseLayer, x: torch.Tensor) -> tuple[Sum, Saved]:
        tape: list[Any] = []
        self._tape = tape
        out = super().layer(number, weights, x, None)
        self._tape = None
        return out, Saved(*tape)

    def feed_forward(self, weights: DenseLayer, x: torch.Tensor, delta: torch.Tensor | None) -> Sum:
        """See DecoderPass; in chunks if the layout says so."""
        size = self.layout.chunk_tokens
        if size is None or size >= len(x):
            return super().feed_forward(weights, x, delta)
        tape, self._tape = self._tape, None
        parts = [DecoderPass.feed_forward(self, weights, part, None)[0] for part in x.split(size)]
        if tape is not None:
            tape += [_normed(x, weights.post_norm), None]
        return torch.cat(parts), None

    def normed(self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        """See DecoderPass."""
        normed = _normed(x, norm)
        self._keep(normed)
        return x, normed.out()

    def linear(self, x: torch.Tensor, projection: Projection) -> torch.Tensor:
        """See DecoderPass."""
        y = self.matmul.linear(x, projection.weight, projection.bias)
        self._keep(y)
        return y

    def project(self, x: torch.Tensor, inputs: torch.Tensor, projection: Projection) -> Sum:
        """See DecoderPass."""
        return self.matmul.linear(inputs, projection.weight, projection.bias, residual=x), None

    def attend(self, number: int, weights: DenseLayer, qkv: torch.Tensor) -> torch.Tensor:
        """See DecoderPass."""
        heads, scoring = self._heads(weights, qkv), Scoring(self.decoder.scale, weights.sliding_window)
        attended = attend_packed(self.layout, number, heads, scoring, self.matmul, self._tape is not None)
        self._keep(heads, attended)
        return attended.out

    def _keep(self, *values: object) -> None:
        if self._tape is not None:
            self._tape += values

    def _heads(self, weights: DenseLayer, qkv: torch.Tensor) -> HeadViews:
        """Inputs of attention, rotated: views of `qkv`, or if the heads are normed first, new queries and keys."""
        q, k, v = turned_heads(self.decoder, weights, qkv, self.turns, lambda x, norm: _normed(x, norm).out(), rotate_)
        return HeadViews(*(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)))

    def backward(self, d_hidden: torch.Tensor, gradients: GradientBuffers) -> list[torch.Tensor]:
        """Adds the gradients of the weights, and returns the gradients of the features of images."""
        decoder, packed, images, last = self.decoder, self.packed, self.images, self.last
        d_last, norm = torch.zeros_like(last), decoder.final_norm
        d_weight = rms_norm_backward_(d_last, d_hidden.clone(), last, norm.weight, inverse_rms(last, norm.eps))
        gradients.add((norm.weight,), d_weight)
        d_x = last.new_zeros(packed.num_tokens, last.shape[1]).index_add_(0, packed.hidden_index, d_last)
        deep: list[torch.Tensor] = []
        for number in range(len(decoder.layers) - 1, self.lowest - 1, -1):
            if images is not None and number < len(images.deep):
                deep.append(d_x.index_select(0, images.index))
            weights = decoder.layers[number]
            d_x = self._layer_backward(weights, self._saved(number, weights), d_x, gradients)
        d_features = [] if images is None else [d_x.index_select(0, images.index), *reversed(deep)]
        if images is not None:
            d_x.index_fill_(0, images.index, 0.0)
        if gradients.wants((decoder.embed,)):
            ids = packed.input_ids[0]
            if decoder.padding_idx is not None:  # an embedding does not learn at its padding token
                d_x.masked_fill_((ids == decoder.padding_idx).unsqueeze(1), 0.0)
            gradients.add_rows(decoder.embed, ids, d_x)
        return d_features

    def _saved(self, number: int, weights: DenseLayer) -> Saved:
        if self.recorded is not None:
            x, qkv, out, middle, gate_up, lse = self.recorded.layer(number)  # copies, which are overwritten
            heads, attended = self._heads(weights, qkv), Attended(out, lse.t().unsqueeze(0))
            normed = _normed(x, weights.input_norm), _normed(middle, weights.post_norm)
            return Saved(normed[0], qkv, heads, attended, normed[1], gate_up)
        saved = self.saved.pop(number)
        return self._with_saved(number, weights, saved)[1] if isinstance(saved, torch.Tensor) else saved

    def _layer_backward(
        self, weights: DenseLayer, saved: Saved, d_out: torch.Tensor, gradients: GradientBuffers
    ) -> torch.Tensor:
        """The gradient of the layer's input, given the output's gradient, which is overwritten."""
        matmul, decoder = self.matmul, self.decoder
        d_middle = self._feed_forward_backward_(weights, saved, d_out, gradients)
        d_o = matmul.operand(d_middle)
        d_attended = matmul.input_gradient(d_o, weights.o.weight)
        self._add_weight_gradient(weights.o, d_o, saved.attended.out, gradients)
        d_qkv = torch.empty_like(saved.qkv)
        into = HeadViews(*(x.transpose(0, 1).unsqueeze(0) for x in by_head(decoder, d_qkv)))
        attend_backward(self.layout, saved.heads, saved.attended, d_attended, decoder.scale, matmul, into)
        self._heads_backward_(weights, saved, d_qkv, gradients)
        return self._norm_and_projection_backward(saved.x, weights.qkv, d_qkv, d_middle, gradients)

    def _feed_forward_backward_(
        self, weights: DenseLayer, saved: Saved, d_out: torch.Tensor, gradients: GradientBuffers
    ) -> torch.Tensor:
        """Turns `d_out` into the gradient of `middle`, in chunks if the forward went in chunks."""
        matmul, chunk = self.matmul, self.layout.chunk_tokens if saved.gate_up is None else None
        size = chunk or len(d_out)
        for start in range(0, len(d_out), size):
            part = slice(start, start + size)
            middle = saved.middle._replace(x=saved.middle.x[part], scale=saved.middle.scale[part])
            d_part, gate_up = d_out[part], saved.gate_up
            if gate_up is None:
                gate_up = matmul.linear(middle.out(), weights.gate_up.weight, weights.gate_up.bias)
            d_down = matmul.operand(d_part)
            d_activated = matmul.input_gradient(d_down, weights.down.weight)
            activated = swiglu_backward_(d_activated, gate_up)  # which is now its own gradient
            self._add_weight_gradient(weights.down, d_down, activated, gradients)
            self._norm_and_projection_backward(middle, weights.gate_up, gate_up, d_part, gradients)
        return d_out

    def _heads_backward_(
        self, weights: DenseLayer, saved: Saved, d_qkv: torch.Tensor, gradients: GradientBuffers
    ) -> None:
        """Turns the gradient of the attention's input into the gradient of the projection's output, in place."""
        decoder, num_turned = self.decoder, self.decoder.num_heads + self.decoder.num_kv_heads
        d_turned = d_qkv.view(len(d_qkv), -1, decoder.head_dim)[:, :num_turned]
        rotate_(d_turned, self.turns.cos, self.turns.turn_back)
        for norm, heads, d_heads in zip(
            (weights.q_norm, weights.k_norm), by_head(decoder, saved.qkv), by_head(decoder, d_qkv), strict=False
        ):
            if norm is None:
                return
            x, d_y = (t.reshape(-1, decoder.head_dim) for t in (heads, d_heads))
            d_x = torch.zeros_like(d_y)
            d_weight = rms_norm_backward_(d_x, d_y.clone(), x, norm.weight, inverse_rms(x, norm.eps))
            gradients.add((norm.weight,), d_weight)
            d_heads.copy_(d_x.view(d_heads.shape))

    def _norm_and_projection_backward(
        self, x: Normed, projection: Projection, d_y: torch.Tensor, d_x: torch.Tensor, gradients: GradientBuffers
    ) -> torch.Tensor:
        """Backward of projection(norm(x)), given its gradient `d_y`; adds the gradient of x to `d_x` and returns `d_x`."""
        d_y = self.matmul.operand(d_y)
        d_normed = self.matmul.input_gradient(d_y, projection.weight)
        if gradients.wants(_weights_of(projection)):
            self._add_weight_gradient(projection, d_y, x.out(), gradients)
        gradients.add((x.norm.weight,), rms_norm_backward_(d_x, d_normed, x.x, x.norm.weight, x.scale))
        return d_x

    def _add_weight_gradient(
        self, projection: Projection, d_y: torch.Tensor, x: torch.Tensor, gradients: GradientBuffers
    ) -> None:
        gradients.add_matmul(_weights_of(projection), d_y, x, self.matmul)
        biases = _biases_of(projection)
        if biases and gradients.wants(biases):
            gradients.add(biases, d_y.sum(0, dtype=torch.promote_types(d_y.dtype, torch.float32)))


def _normed(x: torch.Tensor, norm: Norm) -> Normed:
    return Normed(norm, x, inverse_rms(x, norm.eps))


def _lowest_trained(decoder: DenseDecoder) -> int:
    """The lowest layer through which a gradient must go."""
    if decoder.embed.requires_grad:
        return 0
    for number, weights in enumerate(decoder.layers):
        if any(p.requires_grad for p in _parameters_of(weights)):
            return number
    return len(decoder.layers)


def _parameters(decoder: DenseDecoder) -> list[nn.Parameter]:
    layers = [p for weights in decoder.layers for p in _parameters_of(weights)]
    return [decoder.embed, *layers, decoder.final_norm.weight]


def _parameters_of(weights: DenseLayer) -> list[nn.Parameter]:
    norms = (weights.input_norm, weights.q_norm, weights.k_norm, weights.post_norm)
    parameters = [norm.weight for norm in norms if norm is not None]
    for projection in (weights.qkv, weights.o, weights.gate_up, weights.down):
        parameters += (*_weights_of(projection), *_biases_of(projection))
    return parameters


def _weights_of(projection: Projection) -> tuple[nn.Parameter, ...]:
    return tuple(cast(nn.Parameter, part.weight) for part in projection.parts)


def _biases_of(projection: Projection) -> tuple[nn.Parameter, ...]:
    return tuple(part.bias for part in projection.parts if part.bias is not None)
