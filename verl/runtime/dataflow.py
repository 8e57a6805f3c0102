"""A dataflow written as a chain of stages over the groups of a run.

    controller = Controller(roles)
    step = (
        controller
        .broadcast(prompts)                                     # a batch, or a function without arguments that makes it
        .scatter(responses, worker_group="rollout_group")       # responses(group, batch): a call on that group
        .gather(experience)                                     # experience(batch): rewards, filters, ...
        .all_reduce(advantages)                                 # advantages(batch): over all rows
        .scatter(updates, worker_group="update_group")          # updates(group, batch)
        .sync()
    )

Nothing runs before `sync`. A stage is a function, or the name of a method of the group. Which devices a group has is the run's
placement (verl/parallel/placement.py), so the chain is the same in one process, under torchrun and on Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verl.errors import ConfigError, nearest
from verl.roles.api import Roles
from verl.runtime.worker_group import resolve

Stage = Callable[..., Any] | str
Step = Callable[[Any], Any]


@dataclass(frozen=True)
class Flow:
    """A chain so far; every stage gives a new one, so that chains can share a beginning."""

    groups: Mapping[str, Any]
    steps: tuple[Step, ...] = ()

    def broadcast(self, value: Any) -> Flow:
        """Begin with `value`, the same for everybody."""
        return self._then(lambda _: value() if callable(value) else value)

    def scatter(self, stage: Stage, worker_group: str) -> Flow:
        """A call on a group, whose rows are divided over its ranks; its result, or a future of it, is passed on. Raises
        ConfigError for a group that the run does not have."""
        group = self._group(worker_group)
        if isinstance(stage, str):
            method = getattr(group, stage)
            return self._then(lambda value: method(resolve(value)))
        return self._then(lambda value: stage(group, resolve(value)))

    def gather(self, stage: Callable[[Any], Any]) -> Flow:
        """Wait for the rows of all ranks and apply `stage` to them here."""
        return self._then(lambda value: stage(resolve(value)))

    def all_reduce(self, stage: Callable[[Any], Any]) -> Flow:
        """The same for values over all rows (advantages): every rank that runs the program gets equal ones."""
        return self.gather(stage)

    def sync(self) -> Any:
        """Run the chain; the result of its last stage, finished."""
        value: Any = None
        for step in self.steps:
            value = step(value)
        return resolve(value)

    def _then(self, step: Step) -> Flow:
        return Flow(self.groups, (*self.steps, step))

    def _group(self, name: str) -> Any:
        group = self.groups.get(name)
        if group is None:
            there = [n for n, found in self.groups.items() if found is not None]
            hint = nearest(name, there) or f"; there are {', '.join(there)}"
            raise ConfigError(f"The run has no worker group {name!r}{hint}")
        return group


class Controller(Flow):
    """The beginning of a chain over the roles of a run, and over other groups."""

    def __init__(self, roles: Roles | None = None, **groups: Any):
        super().__init__({**(_groups_of(roles) if roles is not None else {}), **groups})


def _groups_of(roles: Roles) -> dict[str, Any]:
    """Groups under their names in a chain: {role}_group, and update_group for the actor."""
    models = {f"{name}_group": handle for name, handle in roles.models.items()}
    found = {"rollout_group": roles.rollout, "update_group": models.get("actor_group"), **models}
    return {**found, "reward_group": roles.reward}
