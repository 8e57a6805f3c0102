"""Layouts: how the devices of a role divide its model and its work. Memory of a model on one device, by part: closed forms.

    memory(shape, layout, tokens=4096, sequence=4096)      Bytes(weights, grads, optimizer, activations, kv, buffers)

Training state by mixed precision (bfloat16 weights, float32 gradients, masters and two moments of AdamW): 18 bytes a parameter.
With `width` 4 (bytes of an element) weights are float32 and their own masters: 16 bytes.
Activations of a layer per token (Korthikanti et al., arXiv:2205.05198, section 4): inputs of both norms, of attention and of
the MLP are complete on every tensor parallel rank unless the sequence is divided too; queries, keys, values, outputs and
inner vectors of the MLP are divided. Attention that keeps its scores holds 5 a s bytes more per token. For GPT these are
the paper's s b h (10 + 24/t + 5 a s / (h t)), s b h (34/t + 5 a s / (h t)), 34 s b h / t and 2 s b h.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Literal

from verl.config.active_keys import MOST_REUSED_TOKENS
from verl.models.shapes import ModelShape

Recompute = Literal["none", "scores", "selective", "full", "host"]


@dataclass(frozen=True)
class ParallelLayout:
    """Parallel sizes of a role that trains or computes: `data` x `context` x `tensor` x `pipeline` devices, tensor parallel
    ranks next to each other. `expert` ranks, of data, context and tensor, divide the experts of a mixture.

    `micro_batch` is in tokens of a device's data parallel group. `zero` is the stage of ZeRO (arXiv:1910.02054): 1 divides the
    optimizer's state over data and context ranks, 2 gradients too, 3 weights too (FSDP). `offload`: the state lies in the
    host's memory while the role is idle. `chunks`: chunks of a stage in an interleaved pipeline. `recompute`: "scores" of
    attention, which fused attention never keeps (`keeps_scores`), "selective" norms, rotary embedding and SwiGLU, "full"
    layers, "host" layers whose inputs wait in the host's memory. `logit_chunk`: rows of logits that exist at once; 0: all.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    zero: int = 1
    offload: bool = False
    recompute: Recompute = "none"
    micro_batch: int = 0
    chunks: int = 1
    sequence_parallel: bool = True
    keeps_scores: bool = False
    dropout: bool = False
    logit_chunk: int = 0

    @property
    def num_devices(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def recomputes_layers(self) -> bool:
        return self.recompute in ("full", "host")

    @property
    def recompute_of_modules(self) -> Recompute:
        """Modules of transformers recompute all of a layer or nothing."""
        return "full" if self.recompute in ("selective", "full", "host") else self.recompute

    @property
    def data_ranks(self) -> int:
        """Ranks that repeat the same dense parameters."""
        return self.data * self.context

    @property
    def expert_data_ranks(self) -> int:
        """Ranks that repeat the same experts."""
        return max(1, self.data * self.context * self.tensor // self.expert)

    @property
    def group_sizes(self) -> tuple[int, int, int]:
        """Sizes of the tensor, pipeline and expert parallel process groups."""
        return self.tensor, self.pipeline, self.expert

    def replace(self, **changes: Any) -> ParallelLayout:
        return dataclasses.replace(self, **changes)

    def text(self) -> str:
        """ "dp 4, tp 2, zero 1, full recompute"."""
        sizes = {"dp": self.data, "tp": self.tensor, "pp": self.pipeline, "cp": self.context, "ep": self.expert}
        parts = [f"{name} {size}" for name, size in sizes.items() if size > 1] or ["dp 1"]
        parts += [f"ZeRO-{self.zero}"] if self.data_ranks > 1 and self.zero else []
        texts = {
            "selective": "selective recompute",
            "full": "full recompute",
            "host": "full recompute, inputs on the host",
        }
        parts += [texts[self.recompute]] if self.recompute in texts else []
        parts += ["offload"] if self.offload else []
        return ", ".join(parts)


WEIGHT, GRAD = 2, 4  # bytes of a parameter in training
INPUTS_AT_ONCE = 2  # inputs of layers on the device, if the host holds them (verl/models/decoder/kept.py)
FLOAT32 = 4


@dataclass(frozen=True)
class Bytes:
    """Bytes of one device by part; `buffers` are layers gathered for a moment, logits, and a layer that is recomputed."""

    weights: float = 0.0
    grads: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    kv: float = 0.0
    buffers: float = 0.0

    @property
    def state(self) -> float:
        """Bytes that stay between the phases of a step, unless they are offloaded."""
        return self.weights + self.grads + self.optimizer

    @property
    def transient(self) -> float:
        """Bytes that live only while the role works."""
        return self.activations + self.kv + self.buffers

    @property
    def total(self) -> float:
        return self.state + self.transient

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def parameters_per_device(shape: ModelShape, layout: ParallelLayout) -> tuple[float, float]:
    """(parameters that every data parallel rank repeats, routed experts) of one device, before ZeRO divides them. The largest
    stage of a pipeline counts: it has ceil(layers / stages) layers, and an embedding."""
    stage = math.ceil(shape.num_layers / layout.pipeline) / shape.num_layers
    ends = 1 if shape.tied or layout.pipeline > 1 else 2
    embedding = ends * shape.vocab * shape.hidden
    experts = stage * shape.routed_parameters / layout.expert
    tower = shape.tower.num_parameters if shape.tower else 0  # in the first stage, on every tensor parallel rank
    return (stage * shape.block_parameters + embedding) / layout.tensor + tower, experts


def optimizer_bytes(width: int) -> int:
    """Bytes of a parameter that AdamW keeps: two moments in float32, and a master if weights are narrower."""
    return 2 * FLOAT32 + (FLOAT32 if width < FLOAT32 else 0)


@lru_cache(maxsize=1 << 14)
def training_state(
    shape: ModelShape,
    layout: ParallelLayout,
    trained: int | None = None,
    width: int = WEIGHT,
    frozen_width: int | None = None,
) -> Bytes:
    """Weights, gradients and optimizer of one device. `trained`: parameters that are trained, when not all (LoRA); 0 for a
    frozen model. `frozen_width`: bytes of a weight that stays, when not `width`."""
    dense, experts = parameters_per_device(shape, layout)
    ranks, expert_ranks = layout.data_ranks, layout.expert_data_ranks
    share = 1.0 if trained is None else trained / shape.num_parameters

    def divided(stage: int) -> float:
        """Parameters of a device if ZeRO divides from `stage` on."""
        if layout.zero < stage:
            return dense + experts
        return dense / ranks + experts / expert_ranks

    optimizer = optimizer_bytes(width) * share * divided(1)
    weights = width * share + (frozen_width or width) * (1 - share)
    return Bytes(weights=weights * divided(3), grads=GRAD * share * divided(2), optimizer=optimizer)


def activation_bytes_of_layer(shape: ModelShape, layout: ParallelLayout, sequence: float) -> float:
    """Bytes that a layer keeps per token for its backward pass, at the layout's recomputation."""
    h, t = shape.hidden, layout.tensor
    tokens_divided = t if layout.sequence_parallel else 1
    if layout.recomputes_layers:
        return 2 * h / tokens_divided
    keys = shape.query_size if shape.is_latent else shape.kv_heads * shape.head_dim
    attention = 2.0 * (shape.query_size + 2 * keys + shape.output_size)
    undivided, products, scores = 4.0 * h, shape.num_in, 0.0
    again, mixtures = layout.recompute == "selective", shape.num_mixture_layers / shape.num_layers
    if not again:  # outputs of both norms and of the activation
        undivided, products = 8.0 * h, shape.num_in + 1
    if shape.is_mixture:
        undivided += mixtures * _routing_bytes(shape)
        if not again or layout.expert > 1:  # a copy of the token for each of its experts
            undivided += mixtures * 2 * h * shape.experts_per_token
        if shape.shared_gate:  # the output of the shared expert
            undivided += mixtures * 2 * h
    if layout.keeps_scores or layout.dropout:
        undivided += 2 * h  # masks
        scores = 5 * shape.heads * sequence if layout.keeps_scores and layout.recompute == "none" else 0
    else:  # fused attention: its log-sum-exp, and rotated copies
        attention += FLOAT32 * shape.heads
        attention += 0 if layout.recompute == "selective" else 2 * (shape.query_size + keys)
    if shape.linear is not None:  # the mean over the layers
        share = shape.num_cached_layers / shape.num_layers
        attention = share * (attention + 2 * shape.query_size) + (1 - share) * shape.linear.kept_bytes
    return undivided / tokens_divided + (attention + 2 * products * _inner_size(shape) + scores) / t


def _routing_bytes(shape: ModelShape) -> float:
    """Of a token in a mixture: scores, weights as chosen and as normalized, and three lists of places."""
    return FLOAT32 * (shape.num_experts + 2 * shape.experts_per_token) + 3 * 8 * shape.experts_per_token


def _inner_size(shape: ModelShape) -> float:
    """Elements of a token's inner vectors of the MLP, of all experts that it passes; the mean over the layers."""
    if not shape.is_mixture:
        return shape.intermediate
    mixture = shape.experts_per_token * shape.expert_intermediate + shape.shared_intermediate
    return (shape.dense_layers * shape.intermediate + shape.num_mixture_layers * mixture) / shape.num_layers


@lru_cache(maxsize=1 << 16)
def kept_activations(shape: ModelShape, layout: ParallelLayout, tokens: float, sequence: float) -> float:
    """Bytes of the first stage for micro-batches of `tokens` tokens. It keeps p micro-batches of L / p layers at once; if m
    chunks a stage are interleaved, it keeps L (1 + (p - 1) / (p m)) layers in total."""
    p, layers = layout.pipeline, float(shape.num_layers)
    if layout.recompute == "host":  # a layer computes while the next input arrives
        layers = min(layers, INPUTS_AT_ONCE * p)
    if layout.chunks > 1:
        layers *= 1 + (p - 1) / (p * layout.chunks)
    return layers * tokens / layout.context * activation_bytes_of_layer(shape, layout, sequence)


def tower_activations(shape: ModelShape, layout: ParallelLayout, image_tokens: float) -> float:
    """Bytes that the vision tower keeps for its backward pass over the images that become `image_tokens` tokens."""
    if shape.tower is None:
        return 0.0
    undivided = ParallelLayout(recompute=layout.recompute_of_modules)
    return kept_activations(shape.tower.shape, undivided, image_tokens * shape.tower.patches, 0)


def training_buffers(
    shape: ModelShape, layout: ParallelLayout, tokens: float, sequence: float, width: int = WEIGHT
) -> float:
    """Bytes of short-lived buffers: a layer's gradients and recomputed activations, or the logits of a micro-batch or of a
    chunk of it; and two complete layers if ZeRO-3 gathers them."""
    rows = tokens / layout.context
    # gradients of the layer in its backward: of the MLP's inner vector before and after its activation, and of two others
    layer = rows * width * 2 * (_inner_size(shape) + shape.hidden) / layout.tensor
    if layout.recomputes_layers:
        again = layout.replace(recompute="none")
        layer += rows * activation_bytes_of_layer(shape, again, sequence) * width / WEIGHT
    # as they are computed, and a float32 copy with its gradient
    logits = min(rows, layout.logit_chunk or rows) * shape.vocab / layout.tensor * (width + 2 * FLOAT32)
    gathered = 0.0
    if layout.zero == 3:
        weights = (shape.block_parameters + shape.routed_parameters / layout.expert) / shape.num_layers
        gathered = width * (2 * weights + shape.vocab * shape.hidden) / layout.tensor
    return max(layer, logits) + gathered


def memory(
    shape: ModelShape,
    layout: ParallelLayout,
    *,
    tokens: float = 0,
    sequence: float = 0,
    trained: int | None = None,
    width: int = WEIGHT,
    frozen_width: int | None = None,
    image_tokens: float = 0,
) -> Bytes:
    """Memory of a model that trains with micro-batches of `tokens` tokens in sequences of `sequence` tokens. `trained` and
    `frozen_width` as in `training_state`. `image_tokens` of a micro-batch come from the tower."""
    state = training_state(shape, layout, trained, width, frozen_width)
    if not tokens:
        return state
    return state + Bytes(
        activations=(kept_activations(shape, layout, tokens, sequence) + tower_activations(shape, layout, image_tokens))
        * (width / WEIGHT),
        buffers=training_buffers(shape, layout, tokens, sequence, width),
    )


@lru_cache(maxsize=1 << 14)
def kv_bytes_per_token(shape: ModelShape, tensor: int, width: int = WEIGHT, stored: str = "auto") -> float:
    """Bytes of keys and values of one token on one rank of a rollout engine whose kv_cache_dtype is `stored`; heads that do not
    divide, and latents, are repeated. int8 has a scale for each head."""
    each = width if stored == "auto" else 1 + (FLOAT32 / shape.head_dim if stored == "int8" else 0)
    elements = shape.kv_elements if shape.is_latent else shape.kv_elements / min(tensor, shape.kv_heads)
    return each * elements * shape.num_cached_layers


def state_bytes(shape: ModelShape) -> float:
    """Bytes of the states of a row in layers with linear attention, which do not grow with the row."""
    return FLOAT32 * shape.linear.state_elements if shape.linear else 0.0


def recorded_activations(shape: ModelShape, tokens: float, max_bytes: float) -> float:
    """Bytes of the activations of `tokens` tokens that the sampler keeps for the update, at most `max_bytes`
    (verl/models/decoder/reuse.py); 0 for models that record none."""
    if shape.is_mixture or shape.is_latent or shape.tower or shape.linear:
        return 0.0
    qkv = shape.query_size + 2 * shape.kv_heads * shape.head_dim
    layer = WEIGHT * (2 * shape.hidden + qkv + shape.output_size + shape.num_in * shape.intermediate)
    token = shape.num_layers * (layer + FLOAT32 * shape.heads) + WEIGHT * shape.hidden
    return min(token * min(tokens, MOST_REUSED_TOKENS), max_bytes)
