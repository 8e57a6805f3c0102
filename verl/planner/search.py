"""Search for the best plan: placements of roles on groups of devices, and a layout for each role, by branch and bound.

    plans = search(flow, cluster, workload)          the best plan, and the runner-up with another placement

HybridFlow's auto-mapping (arXiv:2409.19256, algorithms 1 and 2), with three differences. The rollout may have devices of its
own, and then run ahead of training. Layouts cover context and expert parallelism, ZeRO, recomputation, micro-batches,
offload and the rollout engine. And a placement is dropped as soon as the sum of its fastest calls is slower than the best
plan so far.

The time of a placement: each stage lasts as long as the group with the longest calls. Fronts of options (options.py) of roles
that share devices are combined under the memory limit, once for each (roles, number of devices).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from verl.errors import ConfigError
from verl.models.shapes import ModelShape
from verl.planner.cluster import Cluster
from verl.planner.generation import time_transition
from verl.planner.options import Option, Space, options, undominated
from verl.planner.workload import ROLLOUT, Dataflow, Workload

Groups = tuple[tuple[str, ...], ...]
_PARTS = 16  # sizes that are tried for a group of a large cluster


class Shared(NamedTuple):
    """Roles on the same devices: seconds by stage, and their options."""

    seconds: tuple[float, ...]
    chosen: tuple[Option, ...]


@dataclass(frozen=True)
class RunPlan:
    """`groups` of roles, with their numbers of `devices` and layouts. `stages` are the seconds of each stage of the
    dataflow."""

    flow: Dataflow
    workload: Workload
    cluster: Cluster
    groups: Groups
    devices: tuple[int, ...]
    options: tuple[tuple[Option, ...], ...]
    stages: tuple[float, ...]
    sync_s: float
    asynchronous: bool
    step_s: float

    @property
    def gpu_hours(self) -> float:
        return self.step_s * sum(self.devices) / 3600

    def option(self, role: str) -> Option:
        return next(o for chosen in self.options for o in chosen if o.role == role)

    def placement(self) -> str:
        """ "actor, reference on 64; critic on 32"."""
        return "; ".join(f"{', '.join(g)} on {n}" for g, n in zip(self.groups, self.devices, strict=True))


@dataclass
class Statistics:
    """Work of a search."""

    placements: int = 0
    bounded: int = 0


@dataclass(frozen=True)
class Rules:
    """Choices of a search. `asynchronous`: "off", "auto", or "on" for a rollout that runs a step ahead. `placements`: the
    groupings; None: all. `bound`: drop placements that cannot be best."""

    asynchronous: Literal["off", "auto", "on"] = "off"
    placements: tuple[Groups, ...] | None = None
    allocations: tuple[tuple[int, ...], ...] | None = None
    bound: bool = True
    space: Space = field(default_factory=Space)


def search(
    flow: Dataflow,
    cluster: Cluster,
    workload: Workload,
    rules: Rules | None = None,
    statistics: Statistics | None = None,
) -> list[RunPlan]:
    """The best plan of each placement that was not dropped, fastest first. Raises ConfigError when none fits, with the nearest
    change that would."""
    counts, rules = statistics or Statistics(), rules or Rules()
    plans = _plans(flow, cluster, workload, rules, counts)
    if not plans and rules.space.replica_in_node:
        rules = replace(rules, space=replace(rules.space, replica_in_node=False))
        plans = _plans(flow, cluster, workload, rules, counts)
    if not plans:
        raise ConfigError(nothing_fits(flow, cluster, workload, rules))
    return plans


def _plans(flow: Dataflow, cluster: Cluster, workload: Workload, rules: Rules, counts: Statistics) -> list[RunPlan]:
    best, plans = math.inf, []
    for groups in _ordered(flow, rules):
        plan = _best_of(groups, flow, cluster, workload, rules, best, counts)
        if plan is not None:
            plans.append(plan)
            best = min(best, plan.step_s)
    return sorted(plans, key=lambda plan: (plan.step_s, len(plan.groups)))


def _ordered(flow: Dataflow, rules: Rules) -> list[Groups]:
    """The groupings, those with few groups first."""
    if rules.placements is not None:
        return list(rules.placements)
    roles = flow.roles
    groupings = [] if rules.asynchronous == "on" else list(partitions(roles))
    if rules.asynchronous != "off" and flow.generates:
        groupings += [(*rest, (ROLLOUT,)) for rest in partitions(roles)]
    return sorted(groupings, key=len)


def partitions(roles: Sequence[str]) -> Iterator[Groups]:
    """All set partitions: 15 of four roles."""
    if not roles:
        yield ()
        return
    first, later = roles[0], roles[1:]
    for size in range(len(later) + 1):
        for beside in itertools.combinations(later, size):
            apart = [role for role in later if role not in beside]
            for tail in partitions(apart):
                yield ((first, *beside), *tail)


def allocations(groups: Groups, cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """Numbers of devices for each group, which add up to the cluster: whole nodes, or devices of one, in at most 16 steps."""
    n, node = cluster.num_devices, cluster.gpus_per_node if cluster.num_devices > cluster.gpus_per_node else 1
    unit = node * -(-n // (node * _PARTS))
    for cuts in itertools.combinations(range(unit, n, unit), len(groups) - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, n)))


def _best_of(
    groups: Groups, flow: Dataflow, cluster: Cluster, workload: Workload, rules: Rules, best: float, counts: Statistics
) -> RunPlan | None:
    """The best plan with these groups; None when none fits, or when none can be faster than twice `best`."""
    best_plan: RunPlan | None = None
    limit = best * _KEPT
    sizes = rules.allocations if rules.allocations is not None else allocations(groups, cluster)
    for devices in sizes:
        if len(devices) != len(groups):
            continue
        counts.placements += 1
        fronts = []
        for roles, n in zip(groups, devices, strict=True):
            alone = (ROLLOUT,) in groups and "actor" in roles
            shared = _shared(flow, roles, alone, cluster.with_devices(n), workload, rules.space)
            fronts.append(shared)
            if not shared:
                break
        if not all(fronts) or len(fronts) < len(groups):
            continue
        if rules.bound and _lower_bound(fronts, groups) >= min(limit, best_plan.step_s if best_plan else math.inf):
            counts.bounded += 1
            continue
        plan = _combine(fronts, groups, devices, flow, cluster, workload, rules)
        if best_plan is None or plan.step_s < best_plan.step_s:
            best_plan = plan
    return best_plan


# a placement is dropped when it is this many times slower than the best: what remains is shown as runner-up
_KEPT = 3.0


def _lower_bound(fronts: Sequence[Sequence[Shared]], groups: Groups) -> float:
    """The sum over stages of the slowest group's fastest time; of a rollout that runs ahead, the longer of both sides."""
    least = [[min(s.seconds[i] for s in front) for i in range(len(front[0].seconds))] for front in fronts]
    if (ROLLOUT,) in groups:
        ahead = sum(least[groups.index((ROLLOUT,))])
        training = [row for row, roles in zip(least, groups, strict=True) if roles != (ROLLOUT,)]
        return max(ahead, float(sum(max(column) for column in zip(*training, strict=True))))
    return float(sum(max(column) for column in zip(*least, strict=True)))


def _combine(
    fronts: list[tuple[Shared, ...]],
    groups: Groups,
    devices: tuple[int, ...],
    flow: Dataflow,
    cluster: Cluster,
    workload: Workload,
    rules: Rules,
) -> RunPlan:
    """The best choice of one option from each front."""
    ahead = groups.index((ROLLOUT,)) if (ROLLOUT,) in groups else None
    best: tuple[float, tuple[Shared, ...], float] | None = None
    for chosen in itertools.product(*fronts):
        sync = 0.0 if ahead is None else _sync(chosen, groups, devices, flow, cluster)
        total = _step(chosen, ahead) + sync
        if best is None or total < best[0]:
            best = (total, chosen, sync)
    assert best is not None
    total, chosen, sync = best
    stages = tuple(max(column) for column in zip(*(c.seconds for c in chosen), strict=True))
    picked = tuple(c.chosen for c in chosen)
    return RunPlan(flow, workload, cluster, groups, devices, picked, stages, sync, ahead is not None, total)


def _step(chosen: Sequence[Shared], ahead: int | None) -> float:
    """Seconds of a step; `ahead` is the group that generates the next one meanwhile."""
    training = [c.seconds for i, c in enumerate(chosen) if i != ahead]
    trained_s = float(sum(max(column) for column in zip(*training, strict=True)))
    return trained_s if ahead is None else max(trained_s, float(sum(chosen[ahead].seconds)))


def _sync(
    chosen: Sequence[Shared], groups: Groups, devices: tuple[int, ...], flow: Dataflow, cluster: Cluster
) -> float:
    every = {option.role: option for shared in chosen for option in shared.chosen}
    train, rollout = every["actor"].layout, every[ROLLOUT].rollout
    assert train is not None
    assert rollout is not None
    return time_transition(flow.shapes["actor"], train, rollout, cluster, colocated=False)


@lru_cache(maxsize=4096)
def _shared(
    flow: Dataflow, roles: tuple[str, ...], alone: bool, cluster: Cluster, workload: Workload, space: Space
) -> tuple[Shared, ...]:
    """Choices of one option for each of `roles` on all devices of `cluster` that fit and that no other choice dominates."""
    every = [options(flow, role, cluster, workload, space, alone) for role in roles]
    if not space.same_sizes:
        partial = _partial(every, cluster, len(flow.stages))
    else:
        partial = []
        for sizes in dict.fromkeys(option.group_sizes for option in every[0]):
            alike = [[option for option in role_options if option.group_sizes == sizes] for role_options in every]
            partial += _partial(alike, cluster, len(flow.stages))
        partial.sort(key=_order)
    return tuple(Shared(partial[i][0], partial[i][3]) for i in undominated([p[0] for p in partial]))


Partial = tuple[tuple[float, ...], float, float, tuple[Option, ...]]  # seconds by stage, bytes that stay, peak, chosen


def _partial(every: Sequence[Sequence[Option]], cluster: Cluster, num_stages: int) -> list[Partial]:
    """Role by role, partial choices that another one dominates are dropped."""
    partial: list[Partial] = [((0.0,) * num_stages, 0.0, 0.0, ())]
    for role_options in every:
        extended = []
        for option in role_options:
            for seconds, resident, peak, chosen in partial:
                total_resident, highest = resident + option.resident, max(peak, option.peak)
                if total_resident + highest <= cluster.memory:
                    summed = tuple(a + b for a, b in zip(seconds, option.seconds, strict=True))
                    extended.append((summed, total_resident, highest, (*chosen, option)))
        extended.sort(key=_order)
        partial = [extended[i] for i in undominated([(*r[0], r[1], r[2]) for r in extended])]
    return partial


def _order(choice: Partial) -> tuple[float, int, float]:
    seconds, resident, peak, chosen = choice
    return sum(seconds), sum(option.offloads for option in chosen), resident + peak


def _fewer(cluster: Cluster, workload: Workload) -> list[int]:
    """Numbers of nodes that divide by a power of two, of this cluster and of one with a device a sample; the most first."""
    sizes = (cluster.num_devices, min(cluster.num_devices, workload.num_samples))
    units = [cluster.gpus_per_node << power for power in range(7)]
    fewer = {size // unit * unit for size in sizes for unit in units}
    return sorted((n for n in fewer if 0 < n < cluster.num_devices), reverse=True)


def nothing_fits(flow: Dataflow, cluster: Cluster, workload: Workload, rules: Rules) -> str:
    """The sentence for a search without a plan: the nearest number of devices, or device memory, that would do."""
    shape: ModelShape = flow.shapes["actor"]
    size = f"{cluster.num_devices} x {cluster.device.name} ({cluster.device.memory / 1e9:.0f} GB)"
    where = f"{shape.name or 'The model'} ({shape.num_parameters / 1e9:.1f}B parameters) does not fit on {size}"
    colocated = Rules(placements=((flow.roles,),), space=rules.space)
    if not cluster.device.kernels.collectives:  # a processor: it is one device
        return f"{where}. Take a smaller model, or shorten the responses (now {workload.longest:.0f} tokens with the prompt)."
    change = "set plan.cluster.nodes or plan.cluster.gpus_per_node"
    for fewer in _fewer(cluster, workload):
        if _plans(flow, cluster.with_devices(fewer), workload, colocated, Statistics()):
            why = "do not divide as it needs, or are more than its samples occupy"
            return f"{where}: {cluster.num_devices} devices {why}. It fits on {fewer}: {change}."
    for factor in (2, 3, 4, 6, 8, 16, 32, 64):
        larger = cluster.with_devices(cluster.num_devices * factor)
        if _plans(flow, larger, workload, colocated, Statistics()):
            return f"{where} in any layout. It fits on {larger.num_devices}: {change}."
    return (
        f"{where} in any layout, nor on 64 times as many devices. Shorten the responses (now {workload.longest:.0f} "
        "tokens with the prompt), or choose a device with more memory."
    )
