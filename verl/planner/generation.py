"""Time and memory of generation: steps of decoding with a batch that shrinks while samples end. Time to give it new weights.

    time_generate(shape, EngineLayout(replicas=8, tensor=2, slots=256), cluster, workload)

A step lasts as long as reading the weights and the KV cache, or as the matmuls of its rows if that is longer (HybridFlow,
arXiv:2409.19256, section 6: generation is bound by memory), and its all-reduces. The engine replays a graph, so the host adds a
fixed time per step. The prompts of a group share their keys and values. A device receives the slices of new weights that it
lacks, as verl/reshard moves them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from verl.models.memory import (
    FLOAT32,
    WEIGHT,
    Bytes,
    ParallelLayout,
    activation_bytes_of_layer,
    kv_bytes_per_token,
    parameters_per_device,
    state_bytes,
    training_buffers,
    training_state,
)
from verl.models.shapes import ModelShape
from verl.planner import kernels
from verl.planner.cluster import Cluster
from verl.planner.step_time import Time, layer_matmuls, linear_matmuls, mlp_matmuls, time_pass
from verl.planner.workload import SequenceBatch, Workload

_SMALL_KERNELS = 5  # of a layer in the graph: norms, rotation, cache, activation
_PREFILL_TOKENS = 8192  # of a forward over prompts


@dataclass(frozen=True)
class EngineLayout:
    """Parallel sizes of a rollout engine: `replicas` of `tensor` devices. `slots` samples run at once in a replica."""

    replicas: int
    tensor: int = 1
    slots: int = 256

    @property
    def num_devices(self) -> int:
        return self.replicas * self.tensor

    def text(self) -> str:
        tensor = f", tp {self.tensor}" if self.tensor > 1 else ""
        return f"replicas {self.replicas}{tensor}, {self.slots} slots"


def forward_memory(
    shape: ModelShape, layout: ParallelLayout, *, tokens: float, width: int = WEIGHT, frozen_width: int | None = None
) -> Bytes:
    """Memory of a frozen model that computes micro-batches of `tokens` tokens: its weights, the vectors of one layer, and the
    logits of a chunk."""
    state = training_state(shape, layout, 0, width, frozen_width)
    one = activation_bytes_of_layer(shape, layout.replace(recompute="none"), 0) * width / WEIGHT
    one *= tokens / layout.context
    logits = (
        min(tokens / layout.context, layout.logit_chunk or math.inf) * shape.vocab / layout.tensor * (width + FLOAT32)
    )
    gathered = training_buffers(shape, layout.replace(recompute="none"), 0, 0, width)
    return Bytes(weights=state.weights, buffers=max(one, logits) + gathered)


def rollout_weights(shape: ModelShape, tensor: int) -> float:
    """Bytes of the weights of one rank of a rollout engine that divides its experts over all ranks."""
    layout = ParallelLayout(tensor=tensor, expert=tensor if shape.is_mixture else 1)
    return WEIGHT * sum(parameters_per_device(shape, layout))


@lru_cache(maxsize=1 << 16)
def decode_step(shape: ModelShape, tensor: int, cluster: Cluster, active: float, context: float) -> Time:
    """One token for each of `active` samples of a replica; their KV caches have `context` tokens each on average."""
    rows = max(active, 1.0)
    device, t = cluster.device, tensor
    attention = _decode_attention(shape, t, cluster, rows, context)
    dense = shape.num_layers - shape.num_mixture_layers
    matmul = shape.num_cached_layers * _read(cluster, rows, layer_matmuls(shape, t))
    if shape.linear:
        sizes = linear_matmuls(shape.linear, shape.hidden, t)
        matmul += shape.linear.num_layers * _read(cluster, rows, sizes)
        attention += float(kernels.elementwise_time(device, 2 * rows * state_bytes(shape) / t))  # read and written
    matmul += dense * _read(cluster, rows, mlp_matmuls(shape, shape.intermediate, t))
    matmul += shape.num_mixture_layers * _read(cluster, rows, mlp_matmuls(shape, shape.shared_intermediate, t))
    matmul += _read(cluster, rows, [(shape.vocab / t, shape.hidden)])
    experts = 0.0
    if shape.is_mixture:
        inner, top = shape.expert_intermediate, shape.experts_per_token
        once = kernels.experts_time(device, rows, shape.hidden, inner, top, shape.num_experts, t)
        experts = shape.num_mixture_layers * float(once)
    small = shape.num_layers * _SMALL_KERNELS * device.kernels.matmul.latency_us / 2 * 1e-6
    host = small + device.kernels.step_host_s
    messages = shape.num_layers * 2 * _all_reduce(cluster, device.width * rows * shape.hidden, t)
    return Time.of(weights=matmul, experts=experts, kv_cache=attention, tensor_parallel=messages, overhead=host)


def _read(cluster: Cluster, rows: float, sizes: Sequence[tuple[float, float]]) -> float:
    return sum(float(kernels.matmul_time(cluster.device, rows, n, k)) for n, k in sizes)


def _decode_attention(shape: ModelShape, tensor: int, cluster: Cluster, rows: float, context: float) -> float:
    elements, kv_heads = float(shape.kv_elements), 1.0
    if not shape.is_latent:
        elements, kv_heads = elements / min(tensor, shape.kv_heads), max(shape.kv_heads / tensor, 1.0)
    heads = shape.heads / tensor
    return shape.num_cached_layers * float(
        kernels.decode_time(cluster.device, rows, context, elements, kv_heads, heads)
    )


def _all_reduce(cluster: Cluster, num_bytes: float, tensor: int) -> float:
    """Seconds by NCCL, or by one kernel that reads its neighbours' memory if that is faster."""
    group = cluster.group(tensor)
    usual = cluster.collective("all_reduce", num_bytes, group)
    small = cluster.device.kernels.collectives.get("small_all_reduce")
    if small is None or tensor < 2 or tensor > min(group.per_node, 8):
        return usual
    return min(usual, float(kernels.collective_time(small, "all_reduce", num_bytes, tensor, cluster.link_scale)))


@lru_cache(maxsize=1 << 16)
def time_generate(shape: ModelShape, layout: EngineLayout, cluster: Cluster, workload: Workload) -> Time:
    """Seconds until the last sample of a step has ended, on the replica with the most samples."""
    samples = -(-workload.num_samples // layout.replicas)
    prompts = max(1.0, workload.num_prompts / layout.replicas)
    prefill = time_pass(
        shape,
        ParallelLayout(tensor=layout.tensor, zero=0, expert=_experts(shape, layout), micro_batch=_PREFILL_TOKENS),
        cluster,
        SequenceBatch.equal(prompts, workload.prompt_mean)._replace(image_tokens=workload.image_tokens),
        backward=False,
    )
    tower = prefill.parts.get("vision tower", 0.0)
    total = Time.of(prefill=prefill.seconds - tower, vision_tower=tower)
    for segment in workload.response.profile(samples, layout.slots):
        context = workload.prompt_mean + segment.context
        step = decode_step(shape, layout.tensor, cluster, round(segment.active, 1), round(context))
        total += step.times(segment.steps)
    return total


def _experts(shape: ModelShape, layout: EngineLayout) -> int:
    return layout.tensor if shape.is_mixture else 1


def generation_memory(shape: ModelShape, layout: EngineLayout, workload: Workload, width: int = WEIGHT) -> Bytes:
    """Memory of one rank: weights, keys and values of all slots at nine tenths of the lengths, and a forward over prompts."""
    slots = min(layout.slots, -(-workload.num_samples // layout.replicas))
    shared = workload.prompt_mean / workload.samples
    response = (workload.response.mean + workload.response.quantile(0.9)) / 2
    tokens = max(slots * (shared + response), workload.longest)
    prompts = workload.num_prompts * workload.prompt_mean / layout.replicas
    each = ParallelLayout(tensor=layout.tensor, zero=0, expert=_experts(shape, layout), logit_chunk=1024)
    return Bytes(
        weights=rollout_weights(shape, layout.tensor) * width / WEIGHT,
        kv=tokens * kv_bytes_per_token(shape, layout.tensor, width, workload.kv_cache_dtype)
        + slots * state_bytes(shape),
        buffers=forward_memory(shape, each, tokens=min(_PREFILL_TOKENS, prompts), width=width).buffers,
    )


def received_bytes(shape: ModelShape, train: ParallelLayout, rollout: EngineLayout) -> float:
    """Bytes that a device receives when training and generation share devices: its part of the engine's weights, less the
    bytes that it already holds."""
    needed = rollout_weights(shape, rollout.tensor)
    shards = train.tensor * train.pipeline * (train.data_ranks if train.zero == 3 else 1)
    experts = WEIGHT * shape.routed_parameters / (train.pipeline * train.expert)
    if train.zero == 3:
        experts /= train.expert_data_ranks
    held = WEIGHT * (shape.num_parameters - shape.routed_parameters) / shards + experts
    return max(0.0, needed - held)


def time_transition(
    shape: ModelShape, train: ParallelLayout, rollout: EngineLayout, cluster: Cluster, *, colocated: bool
) -> float:
    """Seconds to give new weights to the rollout engine: the bytes that a device lacks by the link they come over. Separate
    rollout devices receive all weights over the network, from as many senders as the training devices have."""
    network = cluster.inter_bytes_s * 0.8
    if not colocated:
        needed = rollout_weights(shape, rollout.tensor)
        first = WEIGHT * shape.num_parameters / min(train.num_devices, rollout.num_devices)
        # training devices send every slice to one replica each; replicas pass it on in a pipeline of messages
        return max(needed, first) / network
    received = received_bytes(shape, train, rollout)
    if not received:
        return 0.0
    within = train.tensor * train.pipeline * (train.data_ranks if train.zero == 3 else 1) <= cluster.domain
    fast = cluster.device.kernels.collectives["all_gather"].gb_per_s * 1e9 * cluster.link_scale
    if within:
        return received / fast
    inside = min(cluster.domain, train.num_devices) / train.num_devices
    return received * (1 - inside) / network + received * inside / fast
