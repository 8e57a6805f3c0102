"""Simulation of a plan, event by event: stages, queues and staleness, devices of unequal speed, failures and recovery.

    run = simulate(plan, Conditions(steps=100, jitter=0.02, hours_between_failures=50_000), seed=0)
    run.write(folder)                 timeline.jsonl and metrics.jsonl in the format of a real run, for `verl show`
    run.write_plan(folder)            planned.jsonl in the folder of a real run, which its page shows next to the measured steps

Two processes run against one clock. The trainer takes a batch from the queue, runs the stages of a step, and syncs the
weights; the rollout fills the queue, at most `staleness` batches ahead. A call on a group ends when the slowest of its
devices does: each device has its own speed, and jitter in each call. A failure of any device stops all; the run resumes
from its last checkpoint after `restart_s`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from verl.planner.dataflow import ROLLOUT
from verl.planner.search import RunPlan
from verl.planner.transition import received_bytes
from verl.tracking.files import append_rows, json_text, write_atomically
from verl.tracking.timeline import PLANNED

_PHASES = {"generate": "rollout", "forward": "training", "train": "training"}
_ROLE_PHASES = {"reward": "reward"}


@dataclass(frozen=True)
class Conditions:
    """Behaviour of the cluster. `jitter` is the standard deviation of the logarithm of a call's time on one device;
    `slow_share` of the devices need `slow_factor` times as long. `hours_between_failures` is the mean of one device (Llama 3,
    arXiv:2407.21783, section 3.3.4: 419 interruptions of 16,384 GPUs in 54 days, 50,700 hours); 0: none fail."""

    steps: int = 100
    jitter: float = 0.01
    slow_share: float = 0.0
    slow_factor: float = 1.3
    hours_between_failures: float = 0.0
    restart_s: float = 600.0
    checkpoint_every: int = 20
    checkpoint_s: float = 30.0
    staleness: int = 1
    prefetch: bool = True  # whether the rollout begins the next batch before the trainer asks


class Failure(NamedTuple):
    """At `time_s` a device failed; the run resumed `from_step`, `lost_s` seconds of work were done twice or spent on the
    restart."""

    time_s: float
    from_step: int
    lost_s: float


@dataclass
class SimulatedRun:
    """`rows` as in timeline.jsonl; `total_s` includes what failures cost."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    total_s: float = 0.0
    num_events: int = 0

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


# a process of the simulation yields seconds to wait, or a condition to wait for, which is tried again after every event
_Process = Generator[Any, None, None]


class _Cluster:
    """Durations of calls: the slowest device of a group decides."""

    def __init__(self, plan: RunPlan, conditions: Conditions, seed: int):
        self.plan, self.conditions = plan, conditions
        self.random = np.random.default_rng(seed)
        total = sum(plan.devices)
        slow = self.random.random(total) < conditions.slow_share
        self.slowness = np.where(slow, conditions.slow_factor, 1.0)
        edges = np.cumsum([0, *plan.devices])
        self.spans = list(itertools.pairwise(edges))

    def seconds(self, group: int, nominal: float) -> float:
        first, last = self.spans[group]
        factors = self.slowness[first:last]
        if self.conditions.jitter:
            factors = factors * np.exp(self.conditions.jitter * self.random.standard_normal(last - first))
        return nominal * float(factors.max())

    def next_failure(self) -> float:
        hours = self.conditions.hours_between_failures
        return float(self.random.exponential(hours * 3600 / len(self.slowness))) if hours else float("inf")


def simulate(plan: RunPlan, conditions: Conditions | None = None, seed: int = 0) -> SimulatedRun:
    """`conditions.steps` steps of `plan`; the same seed gives the same run."""
    setup = conditions or Conditions()
    cluster, run = _Cluster(plan, setup, seed), SimulatedRun()
    start, step = 0.0, 0
    failure = cluster.next_failure()
    while step < setup.steps:
        attempt = _Attempt(plan, setup, cluster, run, step)
        end = attempt.run(start, failure)
        if end < failure:
            run.total_s = end
            break
        saved = attempt.saved
        lost = failure - attempt.saved_at + setup.restart_s if attempt.saved_at else failure - start + setup.restart_s
        run.rows = run.rows[:saved]
        run.failures.append(Failure(failure, saved, lost))
        start, step = failure + setup.restart_s, saved
        failure = start + cluster.next_failure()
    return run


class _Attempt:
    """The run from a checkpoint to its end, or to a failure."""

    def __init__(self, plan: RunPlan, conditions: Conditions, cluster: _Cluster, result: SimulatedRun, step: int):
        self.plan, self.conditions, self.cluster, self.result = plan, conditions, cluster, result
        self.saved, self.saved_at, self.first = step, 0.0, step
        self.now = 0.0
        self.queue: deque[float] = deque()  # batches that wait, by the seconds of their generation
        self.generated = self.trained = step
        self.heap: list[tuple[float, int, _Process]] = []
        self.order = 0
        self.blocked: list[tuple[_Process, Callable[[], bool]]] = []

    def run(self, start: float, until: float) -> float:
        """Execute events up to `until`; the time at which the last process ended, or `until`."""
        self.now = start
        processes = [self._train(), *([self._roll_out()] if self.plan.asynchronous else [])]
        for process in processes:
            self._push(start, process)
        while self.heap:
            time, _, process = heapq.heappop(self.heap)
            if time >= until:
                return until
            self.now = time
            self.result.num_events += 1
            self._advance(process)
            self._wake()
        return self.now

    def _push(self, time: float, process: _Process) -> None:
        heapq.heappush(self.heap, (time, self.order, process))
        self.order += 1

    def _advance(self, process: _Process) -> None:
        """Run `process` to its next wait."""
        wait = next(process, None)
        while callable(wait):
            if not wait():
                self.blocked.append((process, wait))
                return
            wait = next(process, None)
        if wait is not None:
            self._push(self.now + wait, process)

    def _wake(self) -> None:
        """Advance the processes whose condition has become true."""
        while ready := [entry for entry in self.blocked if entry[1]()]:
            self.blocked = [entry for entry in self.blocked if entry not in ready]
            for process, _ in ready:
                self._advance(process)

    def _roll_out(self) -> _Process:
        group = self.plan.groups.index((ROLLOUT,))
        nominal = sum(self.plan.option(ROLLOUT).seconds)
        ahead = self.conditions.staleness if self.conditions.prefetch else 0
        while self.generated < self.conditions.steps:
            yield lambda: self.generated - self.trained <= ahead
            seconds = self.cluster.seconds(group, nominal)
            yield seconds
            self.generated += 1
            self.queue.append(seconds)

    def _train(self) -> _Process:
        setup = self.conditions
        for step in range(self.first, setup.steps):
            row: dict[str, Any] = {"step": step + 1, "of": setup.steps, "start": self.now, "phases": {}, "roles": {}}
            if self.plan.asynchronous:
                began = self.now
                yield lambda: bool(self.queue)
                _add(row, "rollout", self.now - began)
                row["roles"][ROLLOUT] = self.queue.popleft()
            yield from self._stages(row)
            if (step + 1) % setup.checkpoint_every == 0 and setup.hours_between_failures:
                yield setup.checkpoint_s
                _add(row, "saving", setup.checkpoint_s)
                self.saved, self.saved_at = step + 1, self.now
            self._finish(row)

    def _stages(self, row: dict[str, Any]) -> _Process:
        """The calls of each group one after the other, the groups at once; then the weights."""
        for stage, calls in enumerate(self.plan.flow.stages):
            longest: tuple[float, str] = (0.0, "other")
            for index, (roles, options) in enumerate(zip(self.plan.groups, self.plan.options, strict=True)):
                if roles == (ROLLOUT,):
                    continue
                spent = 0.0
                for option in options:
                    seconds = self.cluster.seconds(index, option.seconds[stage]) if option.seconds[stage] else 0.0
                    spent += seconds
                    name = ROLLOUT if any(c.kind == "generate" for c in calls) else option.role
                    if seconds:
                        row["roles"][name] = row["roles"].get(name, 0.0) + seconds
                kind = next((c.kind for c in calls if c.role in roles), "forward")
                phase = _ROLE_PHASES.get(roles[0], _PHASES[kind])
                longest = max(longest, (spent, phase))
            if longest[0]:
                yield longest[0]
                _add(row, longest[1], longest[0])
        if self.plan.sync_s:
            yield self.plan.sync_s
            _add(row, "communication", self.plan.sync_s)

    def _finish(self, row: dict[str, Any]) -> None:
        seconds = self.now - row["start"]
        busy, phases = row["roles"], row["phases"]
        row["seconds"] = seconds
        phases["other"] = max(0.0, seconds - sum(phases.values()))
        row["roles"] = {
            role: {
                "busy_s": b,
                "waiting_s": max(seconds - b, 0.0),
                "utilisation": min(b / seconds, 1.0) if seconds else 0.0,
            }
            for role, b in busy.items()
        }
        row["communication"] = {"seconds": self.plan.sync_s, "bytes": _sync_bytes(self.plan)}
        self.result.rows.append(row)
        self.trained += 1


def _add(row: dict[str, Any], phase: str, seconds: float) -> None:
    row["phases"][phase] = row["phases"].get(phase, 0.0) + seconds


def _sync_bytes(plan: RunPlan) -> float:
    """Bytes of new weights that one device receives."""
    if not plan.flow.generates:
        return 0.0
    actor = plan.option("actor")
    rollout = plan.option(ROLLOUT if plan.asynchronous else "actor").rollout
    if actor.layout is None or rollout is None:
        return 0.0
    return received_bytes(plan.flow.shapes["actor"], actor.layout, rollout)
