"""A role on one or several ranks: the methods of its worker, each divided over the ranks, run there and joined again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from verl.parallel.balance import TokenCost
from verl.parallel.dispatch import CallPlan, Schedule, plan_call
from verl.parallel.mesh import Mesh
from verl.parallel.register import Registered, registered

log = logging.getLogger(__name__)

# (group, method name, plan, whether the caller waits) -> the collected result, or a future of it
Runner = Callable[["WorkerGroup", str, CallPlan, bool], object]


class WorkerGroup:
    """`group.method(...)` for every registered method of `worker_class`; verl/parallel/dispatch.py implements the modes.

    `schedule` is the schedule of a role that trains. `beside_rollout` says whether its ranks are the ranks that generate, and
    `reads_records` whether updates read what these ranks record.
    A call waits for arguments that are futures.
    """

    def __init__(
        self,
        name: str,
        worker_class: type,
        mesh: Mesh,
        runner: Runner,
        *,
        schedule: Schedule | None = None,
        cost: TokenCost | None = None,
        beside_rollout: bool = False,
        reads_records: bool = False,
    ):
        self.name = name
        self.mesh = mesh
        self.schedule = schedule
        self.cost = cost or TokenCost()
        self.beside_rollout, self.reads_records = beside_rollout, reads_records
        self._runner, self._worker_class = runner, worker_class
        for method, declared in registered(worker_class).items():
            if not hasattr(self, method):
                setattr(self, method, partial(self._call, method, declared))

    def __getattr__(self, name: str) -> object:
        raise AttributeError(
            f"The role {self.__dict__.get('name')} has no method {name!r} that can be called on a group; declare it with "
            "@register."
        )

    def set_mesh(self, mesh: Mesh) -> None:
        """The ranks that later calls run on."""
        self.mesh = mesh

    def members(self) -> list[WorkerGroup]:
        """A group of each rank, for calls on that rank only."""
        return [
            WorkerGroup(self.name, self._worker_class, Mesh.flat((rank,)), self._runner) for rank in self.mesh.ranks
        ]

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return self.mesh.size

    def _call(self, method: str, declared: Registered, *args: object, **kwargs: object) -> object:
        if declared.materialize_futures:
            args, kwargs = tuple(map(resolve, args)), {k: resolve(v) for k, v in kwargs.items()}
        # a name would hold the plan's rows as long as the runner waits
        return self._runner(self, method, self._plan(method, declared, args, kwargs), declared.blocking)

    def _plan(self, method: str, declared: Registered, args: tuple[object, ...], kwargs: dict[str, object]) -> CallPlan:
        plan = plan_call(declared, self, args, kwargs)
        log.debug("%s.%s on %d ranks, rows %s", self.name, method, self.world_size, plan.rows or "all")
        return plan


def resolve(argument: object) -> object:
    """The argument of a call, or the result of the future that it is. Users' own workers may be given any future with `get` and
    `ready`."""
    return argument.get() if hasattr(argument, "get") and hasattr(argument, "ready") else argument
