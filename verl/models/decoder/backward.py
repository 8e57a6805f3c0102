"""The whole decoder as one differentiable function: token ids in, hidden states of the predicting tokens out.

Its backward writes the gradients of the weights into the buffers it is given, and returns them to autograd only when
it is given none.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from verl.models.decoder import layer as one_layer
from verl.models.decoder.reuse import RecordedBatch, is_equal
from verl.models.decoder.weights import DenseDecoder
from verl.models.grad_buffers import GradientBuffers
from verl.models.hf_module import AutogradContext
from verl.models.ops.linear import Matmul
from verl.models.ops.rows import Rotary, inverse_rms, rms_norm, rms_norm_backward_
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
    there; without, autograd gets them. With `checkpointing` only the layers' inputs are kept, and the rest is computed again
    in the backward. Nothing is kept where activations are `recorded`, which take the place of the forward.
    """
    trained = [p for p in _parameters(decoder) if p.requires_grad]
    features = () if images is None else (images.values, *images.deep)
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in (*trained, *features)):
        with torch.no_grad():
            return _forward(decoder, packed, images, None, checkpointing)
    index = None if images is None else images.index
    if recorded is not None and not recorded.store.is_checked:  # once a run
        with torch.no_grad():
            computed, read = (_forward(decoder, packed, None, None, checkpointing, x) for x in (None, recorded))
        recorded = recorded if is_equal(recorded, computed, read) else None
    counts = (checkpointing, recorded, index, len(features))
    hidden: torch.Tensor = _DecoderPass.apply(decoder, packed, gradients, *counts, *features, *trained)
    return hidden


class _DecoderPass(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        decoder: DenseDecoder,
        packed: PackedBatch,
        gradients: GradientBuffers | None,
        checkpointing: bool,
        recorded: RecordedBatch | None,
        index: torch.Tensor | None,
        num_features: int,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        features, trained = tensors[:num_features], tensors[num_features:]
        images = None if index is None else ImageFeatures(index, features[0], features[1:])
        ctx.tape = tape = _Tape(0 if any(x.requires_grad for x in features) else _lowest_trained(decoder))
        ctx.args = (decoder, packed, images, gradients, trained)
        return _forward(decoder, packed, images, tape, checkpointing, recorded)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.tape is None:
            raise RuntimeError("The activations of this forward are used up: its backward runs once.")
        decoder, packed, images, gradients, trained = ctx.args
        tape, ctx.tape, ctx.args = ctx.tape, None, ()
        into = GradientBuffers.apart(trained) if gradients is None else gradients
        of_images = _backward(decoder, packed, images, tape, grads[0], into)
        of_weights = (into.take(p) if gradients is None else None for p in trained)
        return (*(None,) * 7, *of_images, *of_weights)


class _Tape:
    """Activations that the forward keeps for the backward, from layer `lowest` on."""

    def __init__(self, lowest: int):
        self.lowest = lowest
        self.run: one_layer.Pass | None = None
        self.layers: dict[int, one_layer.Saved | torch.Tensor] = {}  # only the input when checkpointing
        self.recorded: RecordedBatch | None = None  # in place of layers
        self.last: torch.Tensor | None = None  # [predictions, hidden], before the final norm


def _forward(
    decoder: DenseDecoder,
    packed: PackedBatch,
    images: ImageFeatures | None,
    tape: _Tape | None,
    checkpointing: bool,
    recorded: RecordedBatch | None = None,
) -> torch.Tensor:
    x = F.embedding(packed.input_ids[0], decoder.embed)
    if packed.noise is not None:
        x = x + packed.noise.to(x)
    if images is not None:
        x = images.embedded(x)
    cos, sin = decoder.rotary(x.unsqueeze(0), packed.position_ids)
    run = one_layer.Pass(decoder, packed.layout, Rotary(cos[0], sin[0]), Matmul(x.dtype, x.device))
    for index in range(len(decoder.layers) if recorded is None else 0):
        keep = tape is not None and index >= tape.lowest
        before = x
        x, saved = one_layer.forward(run, index, x, keep and not checkpointing)
        if tape is not None and keep:
            tape.layers[index] = before if saved is None else saved
        if images is not None:
            x = images.deepened(index, x)
    last = x.index_select(0, packed.hidden_index) if recorded is None else recorded.outputs(packed.hidden_index)
    if tape is not None:
        tape.run, tape.last, tape.recorded = run, last, recorded
    return rms_norm(last, decoder.final_norm, inverse_rms(last, decoder.final_norm))


def _backward(
    decoder: DenseDecoder,
    packed: PackedBatch,
    images: ImageFeatures | None,
    tape: _Tape,
    d_hidden: torch.Tensor,
    gradients: GradientBuffers,
) -> list[torch.Tensor]:
    """Adds the gradients of the weights, and returns the features' ones."""
    run, last = tape.run, tape.last
    assert run is not None
    assert last is not None
    d_last, norm = torch.zeros_like(last), decoder.final_norm
    d_weight = rms_norm_backward_(d_last, d_hidden.clone(), last, norm, inverse_rms(last, norm))
    gradients.add((norm.weight,), d_weight)
    d_x = last.new_zeros(packed.num_tokens, last.shape[1]).index_add_(0, packed.hidden_index, d_last)
    deep: list[torch.Tensor] = []
    for index in range(len(decoder.layers) - 1, tape.lowest - 1, -1):
        if images is not None and index < len(images.deep):
            deep.append(d_x.index_select(0, images.index))
        d_x = one_layer.backward(run, index, _saved(tape, run, index), d_x, gradients)
    of_images = [] if images is None else [d_x.index_select(0, images.index), *reversed(deep)]
    if images is not None:
        d_x.index_fill_(0, images.index, 0.0)
    if gradients.wants((decoder.embed,)):
        ids = packed.input_ids[0]
        if decoder.padding_idx is not None:  # an embedding does not learn at its padding token
            d_x.masked_fill_((ids == decoder.padding_idx).unsqueeze(1), 0.0)
        gradients.add_rows(decoder.embed, ids, d_x)
    return of_images


def _saved(tape: _Tape, run: one_layer.Pass, index: int) -> one_layer.Saved:
    if tape.recorded is not None:
        return one_layer.saved_of(run, index, tape.recorded.layer(index))
    left = tape.layers.pop(index)
    saved = one_layer.forward(run, index, left, keep=True)[1] if isinstance(left, torch.Tensor) else left
    assert saved is not None
    return saved


def _lowest_trained(decoder: DenseDecoder) -> int:
    """The lowest layer through which a gradient must go."""
    if decoder.embed.requires_grad:
        return 0
    for index, layer in enumerate(decoder.layers):
        if any(p.requires_grad for p in one_layer.parameters_of(layer)):
            return index
    return len(decoder.layers)


def _parameters(decoder: DenseDecoder) -> list[nn.Parameter]:
    layers = [p for layer in decoder.layers for p in one_layer.parameters_of(layer)]
    return [decoder.embed, *layers, decoder.final_norm.weight]
