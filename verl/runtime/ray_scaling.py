"""Processes that a run on Ray adds to its roles rollout and reward while it runs, and ends again.

    verl scale RUN rollout=3    role_sizes.json of the run folder, read at every weight sync
    wait_all()                  before the weights change: the work of processes that died is computed elsewhere
    apply(version)              after the change: ready processes join with the new weights, surplus processes end

An added process has a replica of the policy, or scorers, and is in no process group. Its weights come through Ray's object
store, from a rank that generates. A sample is a function of (seed, step, prompt, sample, weights), and so the same
wherever it is computed. If rollout and reward share their devices, a process has both.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from verl.errors import ConfigError, VerlError, WorkerLostError, first_line
from verl.families import engine_facts
from verl.parallel.mesh import Mesh
from verl.roles.api import Roles
from verl.runtime.rank import POLICY
from verl.runtime.ray_cluster import Pending
from verl.runtime.ray_process import Process, pack, unpack
from verl.runtime.ray_sizes import ROLES, read_role_sizes, write_role_sizes
from verl.runtime.worker_group import WorkerGroup
from verl.specs import RolloutSpec

if TYPE_CHECKING:
    from verl.runtime.ray import RayRuntime

log = logging.getLogger(__name__)

_MAX_FAILURES = 5  # starts in a row that fail, until another size is asked for
_NO_DEVICE_S = 60.0


@dataclass
class Added:
    """`built` ends when the process can join."""

    role: str
    process: Process
    built: Pending
    started: float = field(default_factory=time.monotonic)
    is_overdue: bool = False


class RoleScaling:
    """Of the `roles` of a run that generates by `spec`, with ranks built for `task`."""

    def __init__(self, runtime: RayRuntime, roles: Roles, spec: RolloutSpec, task: Mapping[str, Any]):
        self._runtime, self._task, self._folder = runtime, task, runtime.run.folder
        groups: dict[str, object] = {"rollout": roles.rollout, "reward": roles.reward}
        self._groups = {role: group for role, group in groups.items() if isinstance(group, WorkerGroup)}
        self._placed = {role: group.mesh for role, group in self._groups.items()}
        can_scale = scalable_roles(spec, runtime.placement.devices)
        self._sizes = {role: mesh.size for role, mesh in self._placed.items() if role in can_scale}
        self._joined: list[Added] = []
        self._starting: list[Added] = []
        self._asked: dict[str, int] = {}
        self._calls: list[Pending] = []
        self._num_failures = 0
        if self._sizes:  # so that `verl scale` knows the roles; sizes asked for before a resume stay
            write_role_sizes(self._folder, self._read())

    def process(self, rank: int) -> Process:
        """The added process of `rank`."""
        return next(added.process for added in self._joined if added.process.rank == rank)

    def all_processes(self) -> list[Process]:
        return [added.process for added in (*self._joined, *self._starting)]

    def watch(self, call: Pending) -> None:
        """A call on the rollout that is to end before the weights change."""
        if self._joined:
            self._calls.append(call)

    def wait_all(self) -> None:
        """Wait for the rollout's calls: a share that was lost can be computed again only under the same weights."""
        calls, self._calls = self._calls, []
        for call in calls:
            call.get()

    def apply(self, version: int) -> None:
        """Bring the groups to the sizes that are asked for, as far as processes are ready, and give them the weights of
        `version`."""
        for added in [a for a in self._joined if a.process.is_lost]:
            self._end(added)
        for role, size in self._read().items():
            self._start_and_end(role, size - self._sizes[role])
        self._join()
        self._send_weights(version)
        for role, group in self._groups.items():
            added_ranks = [a.process.rank for a in self._joined if role in self._parts(a.role)]
            mesh = Mesh.flat([*self._placed[role].ranks, *added_ranks]) if added_ranks else self._placed[role]
            if mesh.size != group.mesh.size:
                log.info("%s: %d processes from weight version %d on.", role, mesh.size, version)
            group.set_mesh(mesh)

    def _read(self) -> dict[str, int]:
        """The sizes that are asked for, at least the sizes of the placement."""
        try:
            sizes = read_role_sizes(self._folder)
        except ConfigError as error:
            log.warning("%s", error)
            sizes = self._asked
        if sizes != self._asked:
            self._asked, self._num_failures = sizes, 0
            for role, size in self._sizes.items():
                if sizes.get(role, size) < size:
                    log.warning("%s=%d was asked for, but the %d of its placement stay.", role, sizes[role], size)
        return {role: max(size, sizes.get(role, 0)) for role, size in self._sizes.items()}

    def _parts(self, role: str) -> tuple[str, ...]:
        """The roles of a process that is added to `role`."""
        devices = self._runtime.placement.devices
        return ROLES if role == "rollout" and devices["reward"] == devices["rollout"] else (role,)

    # -- starting and ending

    def _start_and_end(self, role: str, count: int) -> None:
        """Start or end processes until there are `count` in addition to the placement."""
        members = [a for a in (*self._joined, *self._starting) if a.role == role]
        for added in members[count:]:
            self._end(added)
        for _ in range(count - len(members)):
            if self._num_failures < _MAX_FAILURES:
                self._starting.append(self._start(role))

    def _start(self, role: str) -> Added:
        used = {process.rank for process in self.all_processes()}
        rank = next(r for r in range(len(self._runtime.processes), 1 << 30) if r not in used)
        process = self._runtime.add_process(rank, ", ".join(self._parts(role)))
        # the process is the only rank of its roles, and the other roles are elsewhere
        devices = {name: (rank,) if name in self._parts(role) else (0,) for name in self._runtime.placement.devices}
        built = process.handle.build_added.remote(pack({**self._task, "devices": devices}))
        # without a deadline, since nothing waits for it: a device may become free in hours
        return Added(role, process, Pending("building the roles", [(process, built)], math.inf, _only))

    def _end(self, added: Added) -> None:
        if added in self._joined:
            self._joined.remove(added)
        else:
            self._starting.remove(added)
            added.process.is_lost = True  # it answers no call before it is built
        if added.process.is_lost:
            self._runtime.cluster.kill(added.process)
        else:
            self._runtime.cluster.end([added.process])

    def _join(self) -> None:
        """Join the processes that are ready; a process that could not start is tried again."""
        for added in list(self._starting):
            if not added.built.ready():
                if not added.is_overdue and time.monotonic() - added.started > _NO_DEVICE_S:
                    added.is_overdue = True
                    log.warning("%s is not ready after %.0f s: Ray has no free device for it, or it is slow to load.",
                                added.process, _NO_DEVICE_S)  # fmt: skip
                continue
            try:
                node, added.process.pid = added.built.get()
            except (VerlError, RuntimeError) as error:
                self._num_failures += 1
                name = str(added.process).capitalize()
                log.warning("%s did not start (%d in a row): %s", name, self._num_failures, first_line(error))
                self._end(added)
                continue
            added.process.node, self._num_failures = node, 0
            self._starting.remove(added)
            self._joined.append(added)

    def _send_weights(self, version: int) -> None:
        """From a rank of the placement to all processes that were added to the rollout."""
        generating = [added for added in self._joined if added.role == "rollout"]
        if not generating:
            return
        base = self._placed["rollout"].ranks
        source = self._runtime.processes[base[0]]
        weights = source.handle.rollout_weights.remote()
        calls = []
        for place, added in enumerate(generating, start=len(base)):
            ref = added.process.handle.load.remote(version, place, weights)
            calls.append(Pending("weights.sync", [(added.process, ref)], self._runtime.run.call_timeout_s, _only))
        for added, call in zip(generating, calls, strict=True):
            try:
                call.get()
            except WorkerLostError:
                log.warning("%s died in weights.sync; another process starts.", str(added.process).capitalize())
                added.process.is_lost = True
                self._end(added)


def _only(answers: list[Any]) -> Any:
    return unpack(answers[0])


def scalable_roles(spec: RolloutSpec, devices: Mapping[str, Sequence[int]]) -> list[str]:
    """Rollout if each of its devices has a complete replica, no agents act, and none trains. A device that trains could not
    recompute, under the old weights, the work that another process lost. Reward if it has devices without rollout."""
    rollout = spec.section
    is_whole = engine_facts(rollout.name).scales and rollout.tensor_model_parallel_size == 1
    trains = set(devices["rollout"]) & set(devices[POLICY])
    names = ["rollout"] if is_whole and not trains and spec.agents is None else []
    return names if devices["reward"] == devices["rollout"] else [*names, "reward"]
