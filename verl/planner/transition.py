"""Bytes and time of the change from training to generation (HybridFlow, arXiv:2409.19256, Table 2).

A model of M bytes, training p-t-d, generation p_g-t_g with d_g = p t / (p_g t_g). A device receives the
slices that it lacks, as verl/reshard moves them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from verl.planner.cluster import Cluster
from verl.planner.layout import EngineLayout, ParallelLayout
from verl.planner.memory import WEIGHT, rollout_weights
from verl.planner.shapes import ModelShape

Scheme = Literal["DeepSpeed-Chat", "HybridFlow-V", "HybridFlow"]


class Transition(NamedTuple):
    """Per device: bytes received, the most bytes of parameters at once, and bytes held twice."""

    received: float
    peak: float
    redundant: float


def transition_bytes(scheme: Scheme, model: float, train: tuple[int, int, int], rollout: tuple[int, int]) -> Transition:
    """Table 2 for `train` (p, t, d) and `rollout` (p_g, t_g): all-gathers over all devices (DeepSpeed-Chat), over the training
    tensor and pipeline group (HybridFlow-V), or over d_g neighbours by interval groups (HybridFlow)."""
    p, t, d = train
    p_g, t_g = rollout
    if scheme == "DeepSpeed-Chat":
        return Transition((t * p * d - 1) / (t * p * d) * model, model, model / (t * p * d))
    if scheme == "HybridFlow-V":
        return Transition((t * p - 1) / (t * p) * model, model, model / (t * p))
    d_g = p * t / (p_g * t_g)
    return Transition((d_g - 1) / (t * p) * model, model / (t_g * p_g), 0.0)


def received_bytes(shape: ModelShape, train: ParallelLayout, rollout: EngineLayout) -> float:
    """Bytes that a device receives when training and generation share devices: its part of the engine's weights, less the
    bytes that it already holds."""
    needed = rollout_weights(shape, rollout.tensor, rollout.pipeline)
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
        needed = rollout_weights(shape, rollout.tensor, rollout.pipeline)
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
