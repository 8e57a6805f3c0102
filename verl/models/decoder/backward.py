"""The forward of a dense decoder on a CPU, with a backward by hand.

Kept from forward to backward are layer inputs, results of products and the attention's output. Norms and SwiGLU are computed
again, which costs less than keeping them. The backward overwrites the kept tensors. It writes the gradients of the weights into
the buffers that it is given, and returns them to autograd only if it is given none.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from verl.models.decoder.adapted import add_weight_gradient, input_gradient, linear, parameters_of
from verl.models.decoder.forward import DecoderPass, Sum, by_head, embedded, turned_heads, turns_of
from verl.models.decoder.halves import (
    Backward,
    Halves,
    Normed,
    PassPart,
    Saved,
    SavedAttention,
    SavedFeed,
    parameters_of_halves,
)
from verl.models.decoder.layers import DenseLayer, Latent
from verl.models.decoder.mixture import SavedMixture, mixture_backward
from verl.models.decoder.projection import Projection
from verl.models.decoder.reuse import RecordedBatch, is_equal
from verl.models.decoder.taped import TapedPass
from verl.models.decoder.weights import DenseDecoder, Layer
from verl.models.grad_buffers import GradientBuffers
from verl.models.memory import Recompute
from verl.models.ops.pointwise import inverse_rms, rms_norm_backward_
from verl.models.packed import Attended, HeadViews, as_heads
from verl.models.packing import PackedBatch
from verl.models.vision import ImageFeatures


def dense_hidden_states(
    decoder: DenseDecoder,
    packed: PackedBatch,
    gradients: GradientBuffers | None = None,
    recompute: Recompute = "none",
    images: ImageFeatures | None = None,
    recorded: RecordedBatch | None = None,
) -> torch.Tensor:
    """[predictions, hidden_size]: the normed hidden states at `packed.hidden_index`.

    Differentiable once, in the weights and in the features of `images`. With `gradients` the weights' gradients are summed
    there; without, autograd gets them. If `recompute` is "full" only the layers' inputs are kept, and the backward computes the
    layers again; "selective" leaves out normed heads. Nothing is kept if activations are `recorded`, which take the place of
    the forward.
    """
    if recorded is not None and not recorded.store.is_checked:  # once a run
        with torch.no_grad():
            passes = (TrainingPass(decoder, packed, recorded=x) for x in (None, recorded))
            recorded = recorded if is_equal(recorded, *(run.forward() for run in passes)) else None
    return TrainingPass(decoder, packed, gradients, recompute, images, recorded).forward()


class TrainingPass(TapedPass):
    """A forward over a packed batch, with a backward."""

    def __init__(
        self,
        decoder: DenseDecoder,
        packed: PackedBatch,
        gradients: GradientBuffers | None = None,
        recompute: Recompute = "none",
        images: ImageFeatures | None = None,
        recorded: RecordedBatch | None = None,
    ):
        super().__init__(decoder, packed.layout.routing)
        self.packed, self.images, self.recorded = packed, images, recorded
        self.layout, self.gradients, self.recompute = packed.layout, gradients, recompute

    def forward(self) -> torch.Tensor:
        """See `dense_hidden_states`."""
        decoder, packed = self.decoder, self.packed
        x = embedded(decoder, packed.input_ids[0], self.images, packed.noise, self._lookup)
        self.turns = turns_of(decoder, x, packed.position_ids)
        last = self.states(x, self.images)[0].index_select(0, packed.hidden_index)
        return self._differentiated(self._last_norm, last, [decoder.final_norm.weight])

    def _differentiated(
        self,
        forward: Callable[[torch.Tensor], tuple[torch.Tensor, Backward]],
        x: torch.Tensor,
        parameters: Sequence[nn.Parameter],
    ) -> torch.Tensor:
        """The output of a part, as in PassPart."""
        trained = [p for p in parameters if p.requires_grad]
        out: torch.Tensor = PassPart.apply(self.gradients, forward, x, *trained)
        return out

    def _lookup(self, ids: torch.Tensor, weight: nn.Parameter, padding_idx: int | None) -> torch.Tensor:
        def backward(d_x: torch.Tensor, gradients: GradientBuffers) -> None:
            if padding_idx is not None:  # an embedding does not learn at its padding token
                d_x.masked_fill_((ids == padding_idx).unsqueeze(1), 0.0)
            gradients.add_rows(weight, ids, d_x)

        return self._differentiated(lambda ids: (F.embedding(ids, weight), backward), ids, [weight])

    def _last_norm(self, last: torch.Tensor) -> tuple[torch.Tensor, Backward]:
        norm = self.decoder.final_norm
        if self.recorded is not None:
            last = self.recorded.outputs(self.packed.hidden_index)

        def backward(d_hidden: torch.Tensor, gradients: GradientBuffers) -> torch.Tensor:
            d_last = torch.zeros_like(last)
            d_weight = rms_norm_backward_(d_last, d_hidden.clone(), last, norm.factor, inverse_rms(last, norm.eps))
            gradients.add((norm.weight,), d_weight)
            return d_last

        return Normed.of(last, norm).out(), backward

    def layer(self, number: int, weights: Layer, x: torch.Tensor, delta: torch.Tensor | None) -> Sum:
        """See DecoderPass."""
        return weights.call(self._layer, number, x), None

    def _layer(self, number: int, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        if layer.feed is None:
            return self._part(number, layer, x, "both")
        return layer.feed.call(partial(self._part, halves="feed"), number, self._part(number, layer, x, "attention"))

    def _part(self, number: int, layer: Layer, x: torch.Tensor, halves: Halves) -> torch.Tensor:
        weights = layer.gathered()
        trained = [p for p in parameters_of_halves(weights, halves) if p.requires_grad]
        if not torch.is_grad_enabled() or not (trained or x.requires_grad):
            return x if self.recorded is not None else self._halves(number, weights, x, halves)

        def forward(x: torch.Tensor) -> tuple[torch.Tensor, Backward]:
            out, saved = self._forward_of_part(number, weights, x, halves)
            return out, partial(self._backward_of_part, number, layer, halves, [saved])

        return self._differentiated(forward, x, trained)

    def _halves(self, number: int, weights: DenseLayer, x: torch.Tensor, halves: Halves) -> torch.Tensor:
        if halves != "feed":
            x, _ = self.attention(number, weights, x, None)
        return x if halves == "attention" else self.feed_forward(weights, x, None)[0]

    def _forward_of_part(
        self, number: int, weights: DenseLayer, x: torch.Tensor, halves: Halves
    ) -> tuple[torch.Tensor, Saved | torch.Tensor | None]:
        """The output, and what is kept: only the input if the layer is computed again."""
        if self.recorded is not None:  # any output will do
            return x, None
        if self.recompute == "full":
            return self._halves(number, weights, x, halves), x
        out, saved = self._with_saved(number, weights, x, halves)
        attention = saved.attention
        if self.recompute == "selective" and attention is not None and attention.attended.lse is not None:
            attention = attention if weights.q_norm is None else attention._replace(heads=None)
        return out, saved._replace(attention=attention)

    def _backward_of_part(
        self,
        number: int,
        layer: Layer,
        halves: Halves,
        activations: list[Saved | torch.Tensor | None],
        d_out: torch.Tensor,
        gradients: GradientBuffers,
    ) -> torch.Tensor:
        """The gradient of the input, in the memory of `d_out`, which only this layer reads."""
        weights, saved = layer.gathered(), activations.pop()
        if saved is None:
            saved = self._recorded(number, weights)
        elif isinstance(saved, torch.Tensor):
            _, saved = self._with_saved(number, weights, saved, halves)
        return self._layer_backward(weights, saved, d_out, gradients)

    def _with_saved(
        self, number: int, weights: DenseLayer, x: torch.Tensor, halves: Halves
    ) -> tuple[torch.Tensor, Saved]:
        tape: list[Any] = []
        self._tape = tape
        out = self._halves(number, weights, x, halves)
        self._tape = None
        attention = None
        if halves != "feed":
            end = next(place for place, value in enumerate(tape) if type(value) is Attended) + 2
            normed, qkv, *latent, heads, attended, after = tape[:end]
            norms = tuple(value for value in latent if type(value) is Normed)
            attention, tape = SavedAttention(normed, qkv, norms, heads, attended, after), tape[end:]
        if halves == "attention":
            return out, Saved(attention, None)
        middle, *inner = tape
        if (mixture := weights.mixture) is not None:
            if mixture.shared is not None and mixture.shared.gate is None:
                inner = inner[:4]  # its output was only added
            inner = [SavedMixture(*inner)]
        return out, Saved(attention, SavedFeed(middle, *inner))

    def feed_forward(self, weights: DenseLayer, x: torch.Tensor, delta: torch.Tensor | None) -> Sum:
        """See DecoderPass; in chunks if the layout says so. Mixtures stay undivided."""
        size = self.layout.chunk_tokens
        if size is None or size >= len(x) or weights.mixture is not None:
            return super().feed_forward(weights, x, delta)
        tape, self._tape = self._tape, None
        parts = [DecoderPass.feed_forward(self, weights, part, None)[0] for part in x.split(size)]
        if tape is not None:
            tape += [Normed.of(x, weights.post_norm), None]
        return torch.cat(parts), None

    def attend(self, number: int, weights: DenseLayer, qkv: torch.Tensor) -> torch.Tensor:
        """See DecoderPass."""
        heads, keep = self._heads(weights, qkv), self._tape is not None
        attended = self.layout.attend_kept(number, heads, self.decoder.scoring(weights), self.matmul, keep)
        self._keep(heads, attended)
        return _values(weights.latent, attended.out, self.decoder.num_heads)

    def _heads(self, weights: DenseLayer, qkv: torch.Tensor) -> HeadViews:
        """Inputs of attention, rotated: views of `qkv`, or if the heads are normed first, new queries and keys. Latent heads
        have values with zeros behind them, as wide as keys."""
        turned = self.turns[weights.rotary]
        if weights.latent is not None:
            q, k, v = self.latent_heads(weights.latent, qkv, turned)
            return HeadViews(as_heads(q), as_heads(k), as_heads(weights.latent.padded(v)))
        heads = turned_heads(self.decoder, weights, qkv, turned, lambda x, norm: Normed.of(x, norm).out())
        return HeadViews(*map(as_heads, heads))

    def _recorded(self, number: int, weights: DenseLayer) -> Saved:
        assert self.recorded is not None
        x, qkv, out, middle, gate_up, lse = self.recorded.layer(number)  # copies, which are overwritten
        heads, attended = self._heads(weights, qkv), Attended(out, lse.t().unsqueeze(0))
        normed = Normed.of(x, weights.input_norm), Normed.of(middle, weights.post_norm)
        return Saved(SavedAttention(normed[0], qkv, (), heads, attended, None), SavedFeed(normed[1], gate_up))

    def _layer_backward(
        self, weights: DenseLayer, saved: Saved, d_out: torch.Tensor, gradients: GradientBuffers
    ) -> torch.Tensor:
        """The gradient of the input of halves of a layer, given the output's gradient, which is overwritten."""
        if saved.feed is not None:
            d_out = self._feed_forward_backward_(weights, saved.feed, d_out, gradients)
        return (
            d_out if saved.attention is None else self._attention_backward(weights, saved.attention, d_out, gradients)
        )

    def _attention_backward(
        self, weights: DenseLayer, saved: SavedAttention, d_middle: torch.Tensor, gradients: GradientBuffers
    ) -> torch.Tensor:
        matmul, decoder, latent = self.matmul, self.decoder, weights.latent
        d_o = matmul.operand(_through(saved.after, d_middle, gradients))
        d_attended = input_gradient(d_o, weights.o, matmul)
        add_weight_gradient(weights.o, d_o, _values(latent, saved.attended.out, decoder.num_heads), matmul, gradients)
        heads = self._heads(weights, saved.qkv) if saved.heads is None else saved.heads
        d_qkv = torch.empty_like(saved.qkv)
        if latent is None:
            into = HeadViews(*map(as_heads, by_head(decoder, d_qkv)))
        else:
            into = HeadViews(*(torch.empty_like(x) for x in heads))
            d_attended = latent.padded(d_attended.unflatten(1, (decoder.num_heads, -1))).flatten(1)
        self.layout.attend_backward(heads, saved.attended, d_attended, decoder.scale, matmul, into)
        if latent is None:
            self._heads_backward_(weights, saved, d_qkv, gradients)
        else:
            self._latent_backward(latent, weights.rotary, saved.latent, into, d_qkv, gradients)
        return self._norm_and_projection_backward(saved.x, weights.qkv, d_qkv, d_middle, gradients)

    def _latent_backward(
        self,
        latent: Latent,
        rotary: str | None,
        saved: tuple[Normed, ...],
        d_heads: HeadViews,
        d_qkv: torch.Tensor,
        gradients: GradientBuffers,
    ) -> None:
        """Writes the gradient of the narrow vectors into `d_qkv`, given that of queries, keys and padded values."""
        d_q, d_k, d_v = (x[0].transpose(0, 1) for x in d_heads)
        d_turned = d_k[..., latent.plain :].sum(1, keepdim=True)
        for x in (d_q[..., latent.plain :], d_turned):
            self.turns[rotary].rotate_(x, back=True)
        d_kv_up = torch.cat([d_k[..., : latent.plain], d_v[..., : latent.value]], dim=2).flatten(1)
        d_narrow_q, d_narrow_kv, d_shared = latent.parts(d_qkv.zero_())
        d_shared.copy_(d_turned[:, 0])
        self._norm_and_projection_backward(saved[-1], latent.kv_up, d_kv_up, d_narrow_kv, gradients)
        if latent.q_up is None:
            d_narrow_q.copy_(d_q.flatten(1))
        else:
            self._norm_and_projection_backward(saved[0], latent.q_up, d_q.flatten(1), d_narrow_q, gradients)

    def _feed_forward_backward_(
        self, weights: DenseLayer, saved: SavedFeed, d_out: torch.Tensor, gradients: GradientBuffers
    ) -> torch.Tensor:
        """Turns `d_out` into the gradient of `middle`, in chunks if the forward went in chunks."""
        if isinstance(saved.gate_up, SavedMixture):
            assert weights.mixture is not None
            x = saved.middle.out()
            d_normed = mixture_backward(weights.mixture, saved.gate_up, x, d_out, self.matmul, gradients)
            return saved.middle.backward_(d_normed, d_out, gradients)
        matmul, chunk = self.matmul, self.layout.chunk_tokens if saved.gate_up is None else None
        size = chunk or len(d_out)
        for start in range(0, len(d_out), size):
            part = slice(start, start + size)
            middle = saved.middle._replace(x=saved.middle.x[part], scale=saved.middle.scale[part])
            d_part, gate_up = d_out[part], saved.gate_up
            if gate_up is None:
                gate_up = linear(middle.out(), weights.gate_up, matmul)
            after = saved.after
            if after is None and weights.feed_norm is not None:
                after = Normed.of(linear(self.activated(gate_up), weights.down, matmul), weights.feed_norm)
            d_down = matmul.operand(_through(after, d_part, gradients))
            d_activated = input_gradient(d_down, weights.down, matmul)
            activated = self.activation.backward_(d_activated, gate_up)  # which is now its own gradient
            add_weight_gradient(weights.down, d_down, activated, matmul, gradients)
            self._norm_and_projection_backward(middle, weights.gate_up, gate_up, d_part, gradients)
        return d_out

    def _heads_backward_(
        self, weights: DenseLayer, saved: SavedAttention, d_qkv: torch.Tensor, gradients: GradientBuffers
    ) -> None:
        """Turns the gradient of the attention's input into the gradient of the projection's output, in place."""
        decoder, num_turned = self.decoder, self.decoder.num_heads + self.decoder.num_kv_heads
        d_turned = d_qkv.view(len(d_qkv), -1, decoder.head_dim)[:, :num_turned]
        self.turns[weights.rotary].rotate_(d_turned, back=True)
        for norm, heads, d_heads in zip(
            (weights.q_norm, weights.k_norm), by_head(decoder, saved.qkv), by_head(decoder, d_qkv), strict=False
        ):
            if norm is None:
                return
            x, d_y = (t.reshape(-1, decoder.head_dim) for t in (heads, d_heads))
            d_x = torch.zeros_like(d_y)
            d_weight = rms_norm_backward_(d_x, d_y.clone(), x, norm.factor, inverse_rms(x, norm.eps))
            gradients.add((norm.weight,), d_weight)
            d_heads.copy_(d_x.view(d_heads.shape))

    def _norm_and_projection_backward(
        self, x: Normed, projection: Projection, d_y: torch.Tensor, d_x: torch.Tensor, gradients: GradientBuffers
    ) -> torch.Tensor:
        """Backward of projection(norm(x)), given its gradient `d_y`; adds the gradient of x to `d_x` and returns `d_x`."""
        d_y = self.matmul.operand(d_y)
        d_normed = input_gradient(d_y, projection, self.matmul)
        if gradients.wants(parameters_of(projection)):
            add_weight_gradient(projection, d_y, x.out(), self.matmul, gradients)
        return x.backward_(d_normed, d_x, gradients)


def _values(latent: Latent | None, out: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Attention's output [tokens, heads * value_dim], without the padding of latent heads."""
    return out if latent is None else out.unflatten(1, (num_heads, -1))[..., : latent.value].flatten(1)


def _through(after: Normed | None, d_out: torch.Tensor, gradients: GradientBuffers) -> torch.Tensor:
    """The gradient of a half's product, given that of what is added to the half's input."""
    return d_out if after is None else after.backward_(d_out.clone(), torch.zeros_like(d_out), gradients)
