"""Layouts of one role on a number of devices, with their times and memory; dominated layouts are left out.

An option is dominated when another needs no more time in any call, keeps no more between calls and needs no more at its peak.
The search over placements (search.py) only combines options of the front, so it loses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from verl.config.active_keys import REUSED_SHARE
from verl.models.memory import Bytes, ParallelLayout, memory, recorded_activations, training_state
from verl.models.shapes import ModelShape
from verl.planner.cluster import Cluster
from verl.planner.generation import EngineLayout, forward_memory, generation_memory, time_generate, time_transition
from verl.planner.step_time import Time, time_forward, time_train
from verl.planner.workload import Dataflow, SequenceBatch, Workload

_GRID = 1.02
_LOGIT_CHUNK = 1024
_LONG = 16384  # tokens; a longer sequence may be divided over devices
_SLOTS = (8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Space:
    """Choices of the search. `pipelines`: (1,) for an engine that does not divide layers into stages (FSDP).
    `same_sizes`: roles that share devices have the same process groups, as Megatron's must. `repeats_kv`: the rollout engine
    takes more devices than the model has key-value heads. `replica_in_node`: it takes devices of one node, if any plan does.
    `roles`: the choices of single roles."""

    zero: tuple[int, ...] = (1, 3)
    offload: bool = True
    recompute: tuple[str, ...] = ("none", "full")
    tensors: tuple[int, ...] = (1, 2, 4, 8)
    pipelines: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    contexts: tuple[int, ...] = (1, 2, 4, 8)
    same_sizes: bool = False
    repeats_kv: bool = True
    replica_in_node: bool = False
    roles: tuple[tuple[str, Space], ...] = ()

    def of(self, role: str) -> Space:
        return dict(self.roles).get(role, self)


@dataclass(frozen=True)
class Option:
    """A layout of a role. `resident` bytes stay between its calls; `peak` bytes are added while it works. `parts` is the
    memory by part at the peak of each kind of call."""

    role: str
    seconds: tuple[float, ...]  # by stage of the dataflow
    resident: float
    peak: float
    layout: ParallelLayout | None
    rollout: EngineLayout | None = None
    times: Mapping[str, Time] = field(default_factory=dict, compare=False)
    parts: Mapping[str, Bytes] = field(default_factory=dict, compare=False)

    @property
    def offloads(self) -> bool:
        return self.layout is not None and self.layout.offload

    @property
    def group_sizes(self) -> tuple[int, ...]:
        return self.layout.group_sizes if self.layout else ()

    @property
    def key(self) -> tuple[float, ...]:
        return (*self.seconds, self.resident, self.peak)


def front(options: Iterable[Option]) -> list[Option]:
    """The options that no other one dominates, the fastest first."""
    ordered = sorted(options, key=lambda o: (sum(o.seconds), o.offloads, o.resident + o.peak, o.key))
    return [ordered[i] for i in undominated([o.key for o in ordered])]


def _fronts(options: Iterable[Option], space: Space) -> list[Option]:
    """The front; if roles need the same sizes, the front of each combination of sizes."""
    if not space.same_sizes:
        return front(options)
    by_sizes: dict[tuple[int, ...], list[Option]] = {}
    for option in options:
        by_sizes.setdefault(option.group_sizes, []).append(option)
    return [option for alike in by_sizes.values() for option in front(alike)]


def undominated(keys: Sequence[Sequence[float]]) -> list[int]:
    """Places of the keys that no earlier one equals or beats in every part; `keys` ascend by their sum or by a prefix of it."""
    if not keys:
        return []
    front_keys = np.empty((len(keys), len(keys[0])))
    places: list[int] = []
    for place, key in enumerate(keys):
        if not (front_keys[: len(places)] <= np.asarray(key)).all(axis=1).any():
            front_keys[len(places)] = key
            places.append(place)
    return places


def round_up(value: float) -> float:
    """Up to the next power of 1.02: differences that the model cannot tell apart would only make fronts longer."""
    return _GRID ** math.ceil(math.log(value) / math.log(_GRID) - 1e-9) if value > 0 else 0.0


@lru_cache(maxsize=4096)
def options(
    flow: Dataflow, role: str, cluster: Cluster, workload: Workload, space: Space, alone: bool
) -> tuple[Option, ...]:
    """The front of `role` on all devices of `cluster` (a part of the full one). The actor generates there too, unless the
    rollout has separate devices (`alone`). The role "rollout" is such a rollout."""
    space = space.of(role)
    if role == "rollout":
        return tuple(front(_rollouts(flow, cluster, workload, space)))
    trained = _fronts(_trained(flow, role, cluster, workload, space), space)
    if role != "actor" or not flow.generates or alone:
        return tuple(trained)
    rollouts = front(_rollouts(flow, cluster, workload, space))
    return tuple(_fronts(_together(flow, cluster, workload, trained, rollouts), space))


def _trained(flow: Dataflow, role: str, cluster: Cluster, workload: Workload, space: Space) -> Iterator[Option]:
    """Options of the role's calls that are no generation."""
    shape, trains = flow.shapes[role], flow.trains(role)
    for layout in parallel_layouts(shape, cluster, workload, space, trains=trains):
        state = training_state(shape, layout, _trained_parameters(flow, role), cluster.device.width, flow.frozen_width)
        if (state.weights if layout.offload else state.state) > cluster.memory:
            continue
        option = _option(flow, role, layout, cluster, workload, space)
        if option.resident + option.peak <= cluster.memory:
            yield option


def _trained_parameters(flow: Dataflow, role: str) -> int | None:
    if not flow.trains(role):
        return 0
    return flow.trainable if role == "actor" else None


def _option(
    flow: Dataflow, role: str, layout: ParallelLayout, cluster: Cluster, workload: Workload, space: Space
) -> Option:
    shape, width = flow.shapes[role], cluster.device.width
    trained = _trained_parameters(flow, role)
    seconds = [0.0] * len(flow.stages)
    times: dict[str, Time] = {}
    parts: dict[str, Bytes] = {}
    for stage, kind in flow.calls(role):
        if kind == "generate":
            continue
        if kind == "train":
            batch = workload.computed(layout.data, layout.micro_batch, workload.updates)
            tokens = layout.micro_batch
            parts[kind] = memory(
                shape,
                layout,
                tokens=tokens,
                sequence=batch.attended,
                trained=trained,
                width=width,
                frozen_width=flow.frozen_width,
                image_tokens=tokens * batch.image_tokens / batch.mean,
            )
            time = time_train(shape, layout, cluster, batch, workload.updates).times(workload.epochs)
            if trained:
                time = time.times(_FROZEN_SHARE)  # no gradients of the weights that stay
        else:
            frozen = None if trained is None else flow.frozen_width
            parts[kind] = forward_memory(shape, layout, tokens=layout.micro_batch, width=width, frozen_width=frozen)
            time = time_forward(shape, layout, cluster, workload.computed(layout.data, layout.micro_batch))
        if layout.offload:
            moved = parts[kind].state * (2 if kind == "train" else 1)
            time = time + Time.of(offload=cluster.to_host(moved))
        times[kind] = time
        seconds[stage] += times[kind].seconds
    resident = 0.0 if layout.offload else max(part.state for part in parts.values())
    peak = max(part.total for part in parts.values()) - resident
    grid = tuple(map(round_up, seconds))
    return Option(role, grid, round_up(resident), round_up(peak), layout, None, times, parts)


# of a LoRA step to a full one: of three matmuls a layer, gradients of weights are left out; adapters add some
_FROZEN_SHARE = 0.75


def _rollouts(flow: Dataflow, cluster: Cluster, workload: Workload, space: Space) -> Iterator[Option]:
    shape, n = flow.shapes["actor"], cluster.num_devices
    stage = next(i for i, calls in enumerate(flow.stages) for c in calls if c.kind == "generate")
    for tensor in _rollout_sizes(shape, cluster, space):
        replicas = n // tensor
        if replicas > workload.num_samples:
            continue
        each = -(-workload.num_samples // replicas)
        for slots in sorted({min(s, each) for s in _SLOTS}):
            layout = EngineLayout(replicas, tensor, slots)
            part = generation_memory(shape, layout, workload, cluster.device.width)
            if part.total > cluster.memory:
                break
            time = time_generate(shape, layout, cluster, workload)
            seconds = tuple(round_up(time.seconds) if i == stage else 0.0 for i in range(len(flow.stages)))
            yield Option(
                "rollout", seconds, 0.0, round_up(part.total), None, layout, {"generate": time}, {"generate": part}
            )


def _rollout_sizes(shape: ModelShape, cluster: Cluster, space: Space) -> Iterator[int]:
    n = cluster.num_devices
    for tensor in _powers(n):
        if n % tensor or not (_divides_heads(shape, tensor) if space.repeats_kv else _divides(shape, tensor)):
            continue
        within = cluster.gpus_per_node if space.replica_in_node else n if shape.is_mixture else cluster.domain
        if tensor <= within:
            yield tensor


def _together(
    flow: Dataflow, cluster: Cluster, workload: Workload, trained: list[Option], rollouts: list[Option]
) -> Iterator[Option]:
    """The actor's training with a rollout on the same devices: the state stays (or is on the host), and so do activations that
    the update reuses; all else takes turns."""
    shape = flow.shapes["actor"]
    reusable = min(flow.reused_bytes, cluster.memory / REUSED_SHARE)
    recorded = Bytes(activations=recorded_activations(shape, workload.batch.tokens, reusable))
    for train in trained:
        for sampled in rollouts:
            assert train.layout is not None
            assert sampled.rollout is not None
            resident = train.resident + recorded.total
            peak = max(train.peak, sampled.peak)
            if resident + peak > cluster.memory:
                continue
            moved = time_transition(shape, train.layout, sampled.rollout, cluster, colocated=True)
            generate = sampled.times["generate"] + Time.of(weight_sync=moved)
            seconds = tuple(a + b for a, b in zip(train.seconds, sampled.seconds, strict=True))
            stage = max(range(len(sampled.seconds)), key=lambda i: sampled.seconds[i])
            seconds = tuple(round_up(s + (moved if i == stage else 0.0)) for i, s in enumerate(seconds))
            times = {**train.times, "generate": generate}
            parts = {kind: part + recorded for kind, part in {**train.parts, **sampled.parts}.items()}
            yield Option("actor", seconds, resident, peak, train.layout, sampled.rollout, times, parts)


def parallel_layouts(
    shape: ModelShape, cluster: Cluster, workload: Workload, space: Space, *, trains: bool
) -> Iterator[ParallelLayout]:
    """Every layout of a role on all devices of `cluster` with sizes that divide."""
    n, batch = cluster.num_devices, workload.batch
    limit = max(1, int(batch.num / (workload.updates if trains else 1)))  # sequences for data parallel ranks to divide
    contexts = [c for c in space.contexts if c == 1 or workload.longest >= _LONG]
    for tensor in (t for t in space.tensors if t <= cluster.domain):
        for pipeline in space.pipelines:
            for context in contexts:
                data, odd = divmod(n, tensor * pipeline * context)
                if odd or data < 1 or data > limit or not (_divides(shape, tensor) and shape.has_stages(pipeline)):
                    continue
                base = ParallelLayout(data, tensor, pipeline, context, logit_chunk=_LOGIT_CHUNK)
                yield from _variants(shape, base, batch, workload, space, trains)


def _variants(
    shape: ModelShape, base: ParallelLayout, batch: SequenceBatch, workload: Workload, space: Space, trains: bool
) -> Iterator[ParallelLayout]:
    each = batch.tokens / (workload.updates if trains else 1) / base.data
    sizes = {min(each, max(workload.longest, 2048) * k) for k in ((1, 2, 4, 8) if trains else (4,))}
    zeros = [z for z in space.zero if z < 3 or base.pipeline == 1]
    recompute: tuple[str, ...] = space.recompute if trains else ("none",)
    for zero in zeros:
        for expert in _expert_sizes(shape, base, zero):
            for again in recompute:
                for size in sorted(sizes):
                    for offload in (False, True) if space.offload else (False,):
                        changes: dict[str, object] = {"recompute": again, "micro_batch": round(size)}
                        yield base.replace(expert=expert, zero=zero, offload=offload, **changes)


def _expert_sizes(shape: ModelShape, base: ParallelLayout, zero: int) -> list[int]:
    if not shape.is_mixture:
        return [1]
    ranks = base.data_ranks * (1 if zero == 3 else base.tensor)  # FSDP divides experts over the ranks of a shard group
    return [e for e in _powers(min(shape.num_experts, ranks)) if ranks % e == 0 and shape.num_experts % e == 0]


def _divides(shape: ModelShape, tensor: int) -> bool:
    """Whether training engines cut the model into `tensor` equal parts."""
    if shape.linear is not None:
        return tensor == 1
    kv = 0 if shape.is_latent else shape.kv_heads
    return not any(size % tensor for size in (shape.heads, kv, shape.intermediate))


def _divides_heads(shape: ModelShape, tensor: int) -> bool:
    """Whether a rollout engine cuts the model into `tensor` parts, repeating key-value heads."""
    if shape.heads % tensor:
        return False
    return shape.is_latent or shape.kv_heads % tensor == 0 or tensor % shape.kv_heads == 0


def _powers(limit: int) -> list[int]:
    return [1 << i for i in range(max(1, limit).bit_length()) if 1 << i <= limit]
