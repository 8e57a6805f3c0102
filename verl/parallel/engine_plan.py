"""Layout of a rollout engine over devices: its replicas, their ranks, and the devices of each engine process. Pure.

    EnginePlan.of(specs.rollout, specs.place(None))

    ranks 0 1 2 3, tensor_model_parallel_size=2
    replica 0 [0 1]: rank 0 runs the engine, whose process sees devices 0 and 1
    replica 1 [2 3]: rank 2 runs the engine, whose process sees devices 2 and 3

`where` is "ranks" (each rank computes its part in its own process), "process" (the first rank of a replica starts a process
that spans the devices of all of them), or "service" (a server that others run; the first rank of all talks to it). Prompts
are divided over replicas. The ranks of a replica get the same call, and the first one answers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from verl.config import full_key
from verl.errors import ConfigError
from verl.families import engine_facts, needs_engine
from verl.parallel.mesh import Mesh
from verl.parallel.placement import Placement

if TYPE_CHECKING:
    from verl.specs import RolloutSpec

Where = Literal["ranks", "process", "service"]

_KEYS = full_key("rollout")
_TENSOR, _PIPELINE = f"{_KEYS}.tensor_model_parallel_size", f"{_KEYS}.pipeline_model_parallel_size"
_DATA, _EXPERT = f"{_KEYS}.data_parallel_size", f"{_KEYS}.expert_parallel_size"


@dataclass(frozen=True)
class Sizes:
    """The parallel sizes of a rollout."""

    tensor: int = 1
    data: int = 1
    pipeline: int = 1
    expert: int = 1


@dataclass(frozen=True)
class EngineReplica:
    """`ranks` of the run, one device each, that share a copy of the model. `devices` are the devices that its engine
    process sees, numbered on node `node`; a replica of a single rank may span more devices than it has ranks."""

    ranks: tuple[int, ...]
    node: int
    devices: tuple[int, ...]

    @property
    def owner(self) -> int:
        """The rank that runs the engine process, or answers for the further ranks."""
        return self.ranks[0]


@dataclass(frozen=True)
class EnginePlan:
    """`replicas` in the order of their share of the prompts; every rank that generates is in one of them."""

    engine: str
    where: Where
    sizes: Sizes
    replicas: tuple[EngineReplica, ...]

    @classmethod
    def of(cls, spec: RolloutSpec, placement: Placement, order: Sequence[int] | None = None) -> EnginePlan:
        """The plan of a run. `order`: the ranks of the rollout, neighbours in a replica (default: ascending). Raises
        ConfigError when devices do not divide as the spec asks."""
        rollout = spec.section
        return plan_engine(
            rollout.name,
            rollout.mode,
            placement.devices["rollout"] if order is None else order,
            Sizes(
                rollout.tensor_model_parallel_size,
                rollout.data_parallel_size,
                rollout.pipeline_model_parallel_size,
                rollout.expert_parallel_size,
            ),
            num_devices=placement.num_devices,
            devices_per_node=placement.devices_per_node,
            has_service=rollout.service.url is not None,
            devices_key=spec.devices_key,
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that generate, replica by replica."""
        return tuple(rank for replica in self.replicas for rank in replica.ranks)

    @property
    def mesh(self) -> Mesh:
        """The mesh over `ranks`: the ranks of a replica differ in "tp" and get the same prompts."""
        return Mesh.grid(self.ranks, replicate=len(self.replicas), tp=len(self.replicas[0].ranks))

    def replica_of(self, rank: int) -> EngineReplica:
        return next(replica for replica in self.replicas if rank in replica.ranks)

    def runs_engine(self, rank: int) -> bool:
        """Whether `rank` has an engine: every rank if ranks compute, else the owners."""
        return self.where == "ranks" or self.replica_of(rank).owner == rank

    def describe(self) -> str:
        """The replicas and their devices, for the layout of a dry run."""
        first, last = self.replicas[0], self.replicas[-1]
        if self.where == "service":
            return (
                f"{self.engine} is one service; rank {first.owner} sends it the prompts of {_count(self.ranks, 'rank')}"
            )
        how = f" (tensor parallel {self.sizes.tensor})" if self.sizes.tensor > 1 else ""
        text = f"{_count(self.replicas, 'replica')} of {self.engine} on {_count(first.devices, 'device')} each{how}: "
        text += _place(first)
        text += f" ... {_place(last)}" if last is not first else ""
        if self.where == "process":
            return f"{text}; each runs in a process of its own, which its first rank starts"
        return f"{text}; each runs in the processes of its devices"


def plan_engine(
    engine: str,
    mode: str,
    ranks: Sequence[int],
    sizes: Sizes,
    *,
    num_devices: int,
    devices_per_node: int,
    has_service: bool = False,
    devices_key: str = "trainer.n_gpus_per_node",
) -> EnginePlan:
    """The plan for `engine` over `ranks` of a run with `num_devices` devices. `has_service`: a server was given by its
    address. `devices_key` names the keys that say how many ranks there are, for errors.

    Raises ConfigError when the sizes do not divide, and for a layout that the engine does not have.
    """
    where = _where(engine, mode, sizes, len(ranks) == num_devices, num_devices, has_service)
    if where == "service":
        return EnginePlan(engine, where, Sizes(), (EngineReplica(tuple(ranks), 0, ()),))
    if where == "ranks" and num_devices == 1:
        sizes = Sizes()  # one device holds the model; the keys are not read
    _check_sizes(engine, sizes)
    if num_devices == 1 and sizes.data == 1:  # the engine process takes devices in addition to the one rank's
        return EnginePlan(engine, where, sizes, (EngineReplica(tuple(ranks), 0, tuple(range(sizes.tensor))),))
    if len(ranks) % (sizes.tensor * sizes.data):
        raise ConfigError(
            f"The {len(ranks)} devices of the rollout do not divide into groups of {_asked(sizes)}; choose sizes whose product "
            f"divides {len(ranks)}, or change their number ({devices_key})."
        )
    groups = [tuple(ranks[first : first + sizes.tensor]) for first in range(0, len(ranks), sizes.tensor)]
    replicas = tuple(_replica(group, where, sizes, devices_per_node) for group in groups)
    return EnginePlan(engine, where, sizes, replicas)


def _where(engine: str, mode: str, sizes: Sizes, all_generate: bool, num_devices: int, has_service: bool) -> Where:
    facts = engine_facts(engine)
    if facts.asks_service and (has_service or facts.needs_service):
        return "service"
    if not facts.starts_process:
        return "ranks"
    # an engine's workers can be the ranks of the run if those are as many, and all of them generate
    fits = all_generate and (num_devices > 1 or sizes.tensor == 1)
    return "ranks" if facts.joins_ranks and mode == "sync" and fits else "process"


def _check_sizes(engine: str, sizes: Sizes) -> None:
    if min(sizes.tensor, sizes.data, sizes.pipeline, sizes.expert) < 1:
        raise ConfigError(f"{_asked(sizes)}: sizes of a rollout's groups must be at least 1.")
    if sizes.pipeline > 1:
        raise ConfigError(
            f"{_PIPELINE}={sizes.pipeline}: no rollout engine divides layers into stages here. Set it to 1, and raise "
            f"{_TENSOR} instead."
        )
    if sizes.tensor > 1 and not engine_facts(engine).divides_model:
        raise ConfigError(
            f"{needs_engine(_asked(sizes), 'divides_model')}. {engine} generates with a whole model on each device. Set "
            f"{_KEYS}.name, or the size to 1."
        )
    if sizes.expert not in (1, sizes.tensor):
        raise ConfigError(
            f"{_EXPERT}={sizes.expert}: experts are divided over the {sizes.tensor} device(s) of {_TENSOR}, and every data "
            f"parallel replica has all of them. Set {_EXPERT} to {sizes.tensor}, and {_TENSOR} to as many devices as the "
            "model needs."
        )


def _replica(group: tuple[int, ...], where: Where, sizes: Sizes, devices_per_node: int) -> EngineReplica:
    nodes = sorted({rank // devices_per_node for rank in group})
    if where == "process" and len(nodes) > 1:
        raise ConfigError(
            f"{_asked(sizes)}: ranks {group[0]} to {group[-1]} would share an engine process, but trainer.n_gpus_per_node="
            f"{devices_per_node} puts them on several nodes. Choose sizes whose product divides {devices_per_node}."
        )
    return EngineReplica(group, nodes[0], tuple(rank % devices_per_node for rank in group))


def _asked(sizes: Sizes) -> str:
    return f"{_TENSOR}={sizes.tensor}" + (f" x {_DATA}={sizes.data}" if sizes.data != 1 else "")


def _place(replica: EngineReplica) -> str:
    devices = replica.devices
    is_span = len(devices) > 1 and devices == tuple(range(devices[0], devices[-1] + 1))
    numbers = f"{devices[0]}-{devices[-1]}" if is_span else ", ".join(map(str, devices))
    return f"device{'s' if len(devices) > 1 else ''} {numbers} of node {replica.node}"


def _count(things: Sequence[object], what: str) -> str:
    return f"{len(things)} {what}{'' if len(things) == 1 else 's'}"
