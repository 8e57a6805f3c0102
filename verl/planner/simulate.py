"""Simulation of a plan, step by step: stages, samples ahead of training, jitter of devices.

    run = simulate(plan, Conditions(steps=100, jitter=0.02), seed=0)
    run.write(folder)                 timeline.jsonl and metrics.jsonl in the format of a real run, for `verl show`
    run.write_plan(folder)            planned.jsonl in the folder of a real run, shown by its page next to the measured steps

The trainer takes a batch, runs the stages of a step, and syncs the weights. A rollout with separate devices makes the batches,
one ahead of the step that trains. A call on a group ends when the slowest of its devices does: each has jitter in each call.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from verl.planner.generation import received_bytes
from verl.planner.search import RunPlan
from verl.planner.workload import ROLLOUT
from verl.tracking.files import append_rows, json_text, write_atomically
from verl.tracking.timeline import PLANNED, summarise

_PHASES = {"generate": "rollout", "forward": "training", "train": "training"}
_ROLE_PHASES = {"reward": "reward"}


@dataclass(frozen=True)
class Conditions:
    """Behaviour of the cluster. `jitter` is the standard deviation of the logarithm of a call's time on one device."""

    steps: int = 100
    jitter: float = 0.01


@dataclass
class SimulatedRun:
    """`rows` as in timeline.jsonl, and the seconds that they took."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    total_s: float = 0.0

    def write(self, folder: Path) -> None:
        """The files of a run folder that `verl show` reads."""
        folder.mkdir(parents=True, exist_ok=True)
        append_rows(folder / "timeline.jsonl", self.rows)
        metrics = [
            {"step": row["step"], "time": row["start"] + row["seconds"], "timing_s/step": row["seconds"]}
            for row in self.rows
        ]
        append_rows(folder / "metrics.jsonl", metrics)

    def write_plan(self, folder: Path) -> None:
        """planned.jsonl of the run in `folder`; replaces an earlier plan."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / PLANNED, "".join(json_text(row) + "\n" for row in self.rows))


class _Cluster:
    """Durations of calls: the slowest device of a group decides."""

    def __init__(self, plan: RunPlan, conditions: Conditions, seed: int):
        self.plan, self.conditions = plan, conditions
        self.random = np.random.default_rng(seed)

    def seconds(self, group: int, nominal: float) -> float:
        if not self.conditions.jitter:
            return nominal
        return nominal * float(
            np.exp(self.conditions.jitter * self.random.standard_normal(self.plan.devices[group])).max()
        )


def simulate(plan: RunPlan, conditions: Conditions | None = None, seed: int = 0) -> SimulatedRun:
    """`conditions.steps` steps of `plan`; the same seed gives the same run."""
    setup = conditions or Conditions()
    rows = list(_steps(plan, setup, _Cluster(plan, setup, seed)))
    return SimulatedRun(rows, sum(row["seconds"] for row in rows))


def _steps(plan: RunPlan, conditions: Conditions, cluster: _Cluster) -> Iterator[dict[str, Any]]:
    """The rows of all steps."""
    ends: list[float] = []  # of the steps
    generated = 0.0  # when the rollout had its last batch
    for step in range(1, conditions.steps + 1):
        began = ends[-1] if ends else 0.0
        spent: list[tuple[str, float]] = []  # phases in order
        busy: dict[str, float] = {}  # seconds by role
        if plan.asynchronous:
            group, option = plan.groups.index((ROLLOUT,)), plan.option(ROLLOUT)
            busy[ROLLOUT] = cluster.seconds(group, sum(option.seconds))
            behind = ends[-2] if len(ends) > 1 else 0.0
            generated = max(generated, behind) + busy[ROLLOUT]
            spent.append(("rollout", max(0.0, generated - began)))
        spent += _stages(plan, cluster, busy)
        if plan.sync_s:
            spent.append(("communication", plan.sync_s))
        seconds = sum(time for _, time in spent)
        ends.append(began + seconds)
        spans = [{"name": phase, "seconds": time} for phase, time in spent]
        yield {
            "step": step,
            "of": conditions.steps,
            "start": began,
            **summarise(spans, seconds, busy, {phase: (phase, None) for phase, _ in spent}),
            "communication": {"seconds": plan.sync_s, "bytes": _sync_bytes(plan)},
        }


def _stages(plan: RunPlan, cluster: _Cluster, busy: dict[str, float]) -> Iterator[tuple[str, float]]:
    """(phase, seconds) of each stage: calls of a group in turn, groups at once. Adds the time of each role to `busy`."""
    for stage, calls in enumerate(plan.flow.stages):
        longest: tuple[float, str] = (0.0, "other")
        for index, (roles, options) in enumerate(zip(plan.groups, plan.options, strict=True)):
            if roles == (ROLLOUT,):
                continue
            spent = 0.0
            for option in options:
                seconds = cluster.seconds(index, option.seconds[stage]) if option.seconds[stage] else 0.0
                spent += seconds
                name = ROLLOUT if any(c.kind == "generate" for c in calls) else option.role
                if seconds:
                    busy[name] = busy.get(name, 0.0) + seconds
            kind = next((c.kind for c in calls if c.role in roles), "forward")
            longest = max(longest, (spent, _ROLE_PHASES.get(roles[0], _PHASES[kind])))
        if longest[0]:
            yield longest[1], longest[0]


def _sync_bytes(plan: RunPlan) -> float:
    """Bytes of new weights that one device receives."""
    if not plan.flow.generates:
        return 0.0
    actor = plan.option("actor")
    rollout = plan.option(ROLLOUT if plan.asynchronous else "actor").rollout
    if actor.layout is None or rollout is None:
        return 0.0
    return received_bytes(plan.flow.shapes["actor"], actor.layout, rollout)
