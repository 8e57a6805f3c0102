"""A role on several ranks: the same methods as its worker, each cut over the ranks, run there and joined again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from verl.parallel.balance import TokenCost
from verl.parallel.dispatch import Plan, Schedule, plan_call
from verl.parallel.mesh import Mesh
from verl.parallel.register import Registered, registered


def wait(value: Any) -> Any:
    """The value of a call, whether it ran here at once or is a future."""
    return value.get() if hasattr(value, "get") and hasattr(value, "ready") else value


# (group, method name, plan, whether the caller waits) -> the collected result, or a future of it
Runner = Callable[["WorkerGroup", str, Plan, bool], Any]


class WorkerGroup:
    """`group.method(...)` for every registered method of `worker_class`; what a mode does is in verl/parallel/dispatch.py.

    `schedule` is that of a role that trains, `beside_rollout` says that its ranks are those that generate. Arguments that
    are futures are waited for.
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
    ):
        self.name = name
        self.mesh = mesh
        self.schedule = schedule
        self.cost = cost or TokenCost()
        self.beside_rollout = beside_rollout
        self._runner = runner
        for method, declared in registered(worker_class).items():
            setattr(self, method, partial(self._call, method, declared))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"The role {self.name} has no method {name!r} that can be called on a group; declare it with @register."
        )

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return self.mesh.size

    def _call(self, method: str, declared: Registered, *args: Any, **kwargs: Any) -> Any:
        if declared.materialize_futures:
            args, kwargs = tuple(map(wait, args)), {k: wait(v) for k, v in kwargs.items()}
        return self._runner(self, method, plan_call(declared, self, args, kwargs), declared.blocking)
