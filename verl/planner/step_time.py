"""Time of a training or forward pass of a model over a batch, from the kernels of a layer up.

    time_train(shape, layout, cluster, batch)          Time(seconds, {"matmul": ..., "tensor parallel": ..., "bubble": ...})
    time_forward(shape, layout, cluster, batch)

A layer: its matmuls, attention, operations on elements, and the messages of tensor, context and expert parallelism. A
backward pass computes two matmuls for each, and attention at 2.5 times the operations (FlashAttention-2, arXiv:2307.08691).
A pipeline of p stages with m chunks adds (p - 1) / (m n) of the time of n micro-batches (Narayanan et al.,
arXiv:2104.04473). Messages of data parallel ranks are not hidden behind computation, but for the weights that ZeRO-3 gathers
ahead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from verl.models.memory import (
    FLOAT32,
    GRAD,
    WEIGHT,
    ParallelLayout,
    activation_bytes_of_layer,
    parameters_per_device,
)
from verl.models.shapes import LinearAttention, ModelShape, Tower
from verl.planner import kernels
from verl.planner.cluster import Cluster
from verl.planner.workload import SequenceBatch

_ATTENTION_BACKWARD = 3.0  # 2.5 times the operations, at a lower rate
_SCORE_BYTES = 13  # moved per score of attention that is not fused: product, softmax, dropout with its mask
_KERNELS = 24  # that the host launches for the forward pass of a dense layer
_MIXTURE_KERNELS = 20  # more for a router, its permutation and its experts
_LINEAR_KERNELS, _LEVEL_KERNELS = 40, 9  # more for linear attention, and for a chunk of the longest row
# moved per parameter by AdamW, by the width of a weight: with float32 masters, and in float32 with the norm of the gradients
_OPTIMIZER_BYTES = {2: 30, 4: 36}


@dataclass(frozen=True)
class Time:
    """Seconds, and their named parts."""

    seconds: float
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def bound(self) -> str:
        return max(self.parts, key=lambda name: self.parts[name]) if self.parts else ""

    def __add__(self, other: Time) -> Time:
        names = dict.fromkeys([*self.parts, *other.parts])
        return Time(self.seconds + other.seconds, {n: self.parts.get(n, 0.0) + other.parts.get(n, 0.0) for n in names})

    def times(self, factor: float) -> Time:
        return Time(self.seconds * factor, {name: seconds * factor for name, seconds in self.parts.items()})

    @classmethod
    def of(cls, **parts: float) -> Time:
        """The sum of its parts; underscores in their names become spaces."""
        return cls(sum(parts.values()), {name.replace("_", " "): seconds for name, seconds in parts.items()})


ZERO = Time(0.0)


def layer_matmuls(shape: ModelShape, tensor: int) -> list[tuple[float, float]]:
    """(columns, inner size) of the matmuls of a layer's attention to keys on one tensor parallel rank."""
    h, t = shape.hidden, tensor
    out = (h, shape.output_size / t)
    if not shape.is_latent:
        kv = max(shape.kv_heads / t, 1) * shape.head_dim
        queries = shape.query_size * (2 if shape.linear else 1)  # and their gate
        return [(queries / t + 2 * kv, h), out]
    rank, nope = shape.kv_lora_rank, shape.head_dim - shape.rope_head_dim
    keys = [(rank + shape.rope_head_dim, h), (shape.heads * (nope + shape.value_head_dim) / t, rank)]
    if not shape.q_lora_rank:
        return [(shape.query_size / t, h), *keys, out]
    return [(shape.q_lora_rank, h), (shape.query_size / t, shape.q_lora_rank), *keys, out]


def linear_matmuls(linear: LinearAttention, hidden: int, tensor: int) -> list[tuple[float, float]]:
    """The same of a layer with linear attention."""
    inputs = 2 * linear.keys + 2 * linear.values + 2 * linear.heads
    return [(inputs / tensor, hidden), (hidden, linear.values / tensor)]


def mlp_matmuls(shape: ModelShape, inner: float, tensor: int) -> list[tuple[float, float]]:
    """(columns, inner size) of a gated or plain MLP on one tensor parallel rank."""
    return [(shape.num_in * inner / tensor, shape.hidden), (shape.hidden, inner / tensor)] if inner else []


@lru_cache(maxsize=1 << 16)
def _matmul(cluster: Cluster, m: float, n: float, k: float) -> float:
    return float(kernels.matmul_time(cluster.device, m, n, k))


def _matmuls(cluster: Cluster, rows: float, sizes: Sequence[tuple[float, float]], *, backward: bool) -> float:
    if not backward:
        return sum(_matmul(cluster, rows, n, k) for n, k in sizes)
    return sum(_matmul(cluster, rows, k, n) + _matmul(cluster, k, n, rows) for n, k in sizes)


@lru_cache(maxsize=1 << 16)
def _layer(
    shape: ModelShape,
    layout: ParallelLayout,
    cluster: Cluster,
    tokens: float,
    length: float,
    mixture: bool,
    linear: LinearAttention | None,
    backward: bool,
) -> Time:
    """One layer over `tokens` tokens of a context rank, with `linear` attention or to keys."""
    t = layout.tensor
    sizes = linear_matmuls(linear, shape.hidden, t) if linear else layer_matmuls(shape, t)
    sizes += mlp_matmuls(shape, shape.shared_intermediate if mixture else shape.intermediate, t)
    matmul = _matmuls(cluster, tokens, sizes, backward=backward)
    experts = _experts(shape, layout, cluster, tokens, backward) if mixture else ZERO
    launched = _KERNELS + (_MIXTURE_KERNELS if mixture else 0)
    if linear:
        attention = _recurrence(linear, cluster, tokens / t) * (2 if backward else 1)
        launched += _LINEAR_KERNELS + _LEVEL_KERNELS * math.ceil(length / linear.CHUNK)
    else:
        attention = _attention(shape, layout, cluster, tokens, length, backward)
    passes = 1 if not backward else 3 if layout.recompute == "selective" else 2
    moved = _moved_bytes(shape, layout, mixture) * tokens * passes * cluster.device.width / kernels.BF16
    elementwise = float(kernels.elementwise_time(cluster.device, moved))
    messages = _tensor_messages(shape, layout, cluster, tokens, backward)
    messages += _context_messages(shape, layout, cluster, tokens)
    computed = matmul + attention + elementwise + experts.seconds
    launched *= 2 if backward else 1
    waiting = max(0.0, launched * cluster.device.kernels.launch_us * 1e-6 - computed)
    dense = Time.of(
        matmul=matmul, attention=attention, elementwise=elementwise, launches=waiting, tensor_parallel=messages
    )
    return dense + experts


def _attention(
    shape: ModelShape, layout: ParallelLayout, cluster: Cluster, tokens: float, length: float, backward: bool
) -> float:
    heads = shape.heads / layout.tensor
    if not layout.keeps_scores:
        kv = max(shape.kv_heads / layout.tensor, 1)
        # context parallel ranks hold a part of every sequence: the work equals as many complete sequences
        batch = tokens / length
        once = float(kernels.prefill_time(cluster.device, batch, length, heads, kv, shape.head_dim))
        return once * (_ATTENTION_BACKWARD if backward else 1.0)
    flops = 4 * tokens * length * heads * shape.head_dim  # without regard to causality
    once = flops / (cluster.device.peak * cluster.device.kernels.matmul.compute)
    once += float(kernels.elementwise_time(cluster.device, _SCORE_BYTES * tokens * length * heads))
    again = once if layout.recompute == "scores" else 0.0
    return 2 * once + again if backward else once


def _recurrence(linear: LinearAttention, cluster: Cluster, tokens: float) -> float:
    """Seconds of the gated delta rule in chunks, forward, by torch in float32: its products and solves, and each tensor that a
    backward pass keeps is written and read."""
    wide = cluster if cluster.device.width == FLOAT32 else cluster.in_float32()
    products = linear.operations * tokens / (wide.device.peak * wide.device.kernels.matmul.compute)
    return products + float(kernels.elementwise_time(cluster.device, 2 * linear.kept_bytes * tokens))


def _moved_bytes(shape: ModelShape, layout: ParallelLayout, mixture: bool) -> float:
    """Bytes per token that norms, residuals, rotations and activations read and write."""
    divided = layout.tensor if layout.sequence_parallel else 1
    inner = (
        shape.experts_per_token * shape.expert_intermediate + shape.shared_intermediate
        if mixture
        else shape.intermediate
    )
    complete = 20 * shape.hidden + (10 * shape.hidden if layout.dropout else 0)
    return (
        complete / divided
        + (4 * (shape.query_size + shape.kv_heads * shape.head_dim) + 2 * (shape.num_in + 1) * inner) / layout.tensor
    )


def _experts(shape: ModelShape, layout: ParallelLayout, cluster: Cluster, tokens: float, backward: bool) -> Time:
    """The routed experts of a layer: rows go to the rank of their expert, and back."""
    rows = tokens / layout.tensor
    once = float(
        kernels.experts_time(
            cluster.device,
            rows,
            shape.hidden,
            shape.expert_intermediate,
            shape.experts_per_token,
            shape.num_experts / layout.expert,
        )
    )
    size = cluster.device.width * rows * shape.experts_per_token * shape.hidden
    group = cluster.group(layout.expert)
    return Time.of(
        experts=once * (2 if backward else 1), expert_parallel=2 * cluster.collective("alltoall", size, group)
    )


def _tensor_messages(
    shape: ModelShape, layout: ParallelLayout, cluster: Cluster, tokens: float, backward: bool
) -> float:
    """Two all-reduces of the hidden vectors, or as many pairs of gather and scatter; a backward pass gathers the inputs of both
    blocks again, kept by each rank in part (arXiv:2205.05198, section 4.2.2)."""
    group, size = cluster.group(layout.tensor), cluster.device.width * tokens * shape.hidden
    if not layout.sequence_parallel:
        return 2 * cluster.collective("all_reduce", size, group)
    gathers = 2 * cluster.collective("all_gather", size, group)
    return gathers * (2 if backward else 1) + 2 * cluster.collective("reduce_scatter", size, group)


def _context_messages(shape: ModelShape, layout: ParallelLayout, cluster: Cluster, tokens: float) -> float:
    """All-to-alls of queries, keys, values and outputs over the ranks that divide a sequence (Ulysses, arXiv:2309.14509)."""
    elements = (2 * shape.query_size + 2 * shape.kv_heads * shape.head_dim) / layout.tensor
    size = cluster.device.width * tokens * elements
    return cluster.collective("alltoall", size, cluster.group(layout.context, layout.tensor))


@lru_cache(maxsize=1 << 16)
def _head(shape: ModelShape, layout: ParallelLayout, cluster: Cluster, tokens: float, backward: bool) -> Time:
    """The logits of `tokens` tokens, and their loss in float32."""
    sizes = [(shape.vocab / layout.tensor, shape.hidden)] if shape.vocab else []
    moved = 14 * tokens * shape.vocab / layout.tensor * (2 if backward else 1)
    return Time.of(
        head=_matmuls(cluster, tokens, sizes, backward=backward)
        + float(kernels.elementwise_time(cluster.device, moved))
    )


def _stage(
    shape: ModelShape, layout: ParallelLayout, cluster: Cluster, tokens: float, length: float, backward: bool
) -> Time:
    """A micro-batch through the slowest stage of the pipeline: the last one, with the head."""
    stage = math.ceil(shape.num_layers / layout.pipeline) / shape.num_layers
    arguments = (shape, layout, cluster, tokens, length)
    dense, mixture = shape.num_layers - shape.num_mixture_layers, shape.num_mixture_layers
    cached = shape.num_cached_layers / shape.num_layers
    total = _head(shape, layout, cluster, tokens, backward)
    for count, *kind in (
        (dense * cached, False, None), (mixture * cached, True, None),
        (dense * (1 - cached), False, shape.linear), (mixture * (1 - cached), True, shape.linear),
    ):  # fmt: skip
        if not count:
            continue
        layer = _layer(*arguments, *kind, backward)
        if backward and layout.recomputes_layers:
            layer = layer + _layer(*arguments, *kind, False)
        if layout.recompute == "host":
            moving = cluster.to_host(tokens * activation_bytes_of_layer(shape, layout, length))
            layer = layer + Time.of(offload=max(0.0, moving - layer.seconds))
        total = total + layer.times(count * stage)
    return total


def _micro_batches(layout: ParallelLayout, tokens: float) -> tuple[float, float]:
    """(number, tokens of each) for the `tokens` of a data parallel group."""
    number = max(1, math.ceil(tokens / (layout.micro_batch or tokens) - 1e-9))
    return number, tokens / number


def time_pass(
    shape: ModelShape, layout: ParallelLayout, cluster: Cluster, batch: SequenceBatch, *, backward: bool
) -> Time:
    """Kernels of all micro-batches of one pass, with the pipeline's bubble and messages."""
    # sequences are not cut: 128 of them on 96 ranks take as long as 192
    number, tokens = _micro_batches(layout, math.ceil(batch.num / layout.data - 1e-9) * batch.mean)
    rows = tokens / layout.context
    length = min(batch.attended, tokens)
    once = _stage(shape, layout, cluster, rows, length, False)
    if backward:
        once = once + _stage(shape, layout, cluster, rows, length, True)
    total = once.times(number)
    if layout.zero == 3 and layout.data_ranks > 1:
        total = total + _gathers(shape, layout, cluster, once.seconds, number, 2 if backward else 1)
    p = layout.pipeline
    if p > 1:
        across = layout.tensor * layout.context * layout.data >= cluster.domain
        size = cluster.device.width * rows * shape.hidden / (layout.tensor if layout.sequence_parallel else 1)
        sends = layout.chunks * (2 if backward else 1) * number
        bubble = once.seconds * (p - 1) / layout.chunks
        total = total + Time.of(bubble=bubble, pipeline_parallel=sends * cluster.send(size, across=across))
    if shape.tower and batch.image_tokens:
        total = total + Time.of(vision_tower=_tower_time(shape.tower, layout, cluster, batch, backward=backward))
    return total


def _tower_time(
    tower: Tower, layout: ParallelLayout, cluster: Cluster, batch: SequenceBatch, *, backward: bool
) -> float:
    """Seconds of the tower: every data parallel rank has all of it. Its attention sees an image in both directions."""
    patches = batch.image_tokens * tower.patches
    number, tokens = _micro_batches(layout, math.ceil(batch.num / layout.data - 1e-9) * batch.mean)
    alone, length = ParallelLayout(zero=0, recompute=layout.recompute_of_modules), 2 * tower.attended(patches)
    rows = tokens * patches / batch.mean
    once = _stage(tower.shape, alone, cluster, rows, length, False).seconds
    return number * (once + (_stage(tower.shape, alone, cluster, rows, length, True).seconds if backward else 0.0))


def _gathers(
    shape: ModelShape, layout: ParallelLayout, cluster: Cluster, computed: float, number: float, times: int
) -> Time:
    """Time that gathering the weights for each micro-batch adds to the computation beside it."""
    dense, experts = parameters_per_device(shape, layout)
    each = cluster.collective("all_gather", WEIGHT * dense, _data_group(layout, cluster))
    each += cluster.collective("all_gather", WEIGHT * experts, _expert_group(layout, cluster))
    return Time.of(weights_gathered=number * max(0.0, times * each - computed))


def _data_group(layout: ParallelLayout, cluster: Cluster):
    return cluster.group(layout.data_ranks, layout.tensor)


def _expert_group(layout: ParallelLayout, cluster: Cluster):
    return cluster.group(layout.expert_data_ranks, layout.expert)


def _update(shape: ModelShape, layout: ParallelLayout, cluster: Cluster) -> Time:
    """Gradients over the data parallel ranks, the optimizer's step, and the new weights back."""
    dense, experts = parameters_per_device(shape, layout)
    seconds = 0.0
    for size, group in ((dense, _data_group(layout, cluster)), (experts, _expert_group(layout, cluster))):
        if layout.zero == 0:
            seconds += cluster.collective("all_reduce", GRAD * size, group)
        else:
            seconds += cluster.collective("reduce_scatter", GRAD * size, group)
            seconds += cluster.collective("all_gather", WEIGHT * size, group) if layout.zero < 3 else 0.0
    updated = dense / layout.data_ranks + experts / layout.expert_data_ranks if layout.zero else dense + experts
    step = float(kernels.elementwise_time(cluster.device, _OPTIMIZER_BYTES[cluster.device.width] * updated))
    return Time.of(data_parallel=seconds, optimizer=step)


@lru_cache(maxsize=1 << 16)
def time_train(
    shape: ModelShape, layout: ParallelLayout, cluster: Cluster, batch: SequenceBatch, updates: int = 1
) -> Time:
    """Seconds of `updates` optimizer steps that together train once on `batch`."""
    part = batch._replace(num=batch.num / updates)
    one = time_pass(shape, layout, cluster, part, backward=True) + _update(shape, layout, cluster)
    return one.times(updates)


@lru_cache(maxsize=1 << 16)
def time_forward(shape: ModelShape, layout: ParallelLayout, cluster: Cluster, batch: SequenceBatch) -> Time:
    """Seconds of a forward pass over `batch` that keeps nothing: log-probabilities, values, scores."""
    return time_pass(shape, layout, cluster, batch, backward=False)
