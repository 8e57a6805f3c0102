"""A dataflow written as a chain of stages over the groups of a run.

    controller = Controller(roles)
    step = (
        controller
        .broadcast(prompts)                                     # a batch, or a function without arguments that makes it
        .scatter(responses, worker_group="rollout_group")       # responses(group, batch): a call on that group
        .gather(experience)                                     # experience(batch): rewards, filters, ...
        .all_reduce(advantages)                                 # advantages(batch): over all rows; or "sum", "mean", ...
        .scatter(updates, worker_group="update_group")          # updates(group, batch)
        .sync()
    )

Nothing runs before `sync`. A stage is a function, or the name of a method of the group. The devices of a group are the run's
placement (verl/parallel/placement.py), so the chain is the same in one process, under torchrun and on Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from verl.errors import ConfigError, nearest
from verl.roles.api import Roles
from verl.runtime.worker_group import resolve

Stage = Callable[..., object] | str
Step = Callable[[Any], Any]


@dataclass(frozen=True)
class Flow:
    """A chain so far; every stage gives a new one, so that chains can share a beginning."""

    groups: Mapping[str, object]
    steps: tuple[Step, ...] = ()

    def broadcast(self, value: object) -> Flow:
        """Begin with `value`, the same for everybody."""
        return self._then(lambda _: value() if callable(value) else value)

    def scatter(self, stage: Stage, worker_group: str) -> Flow:
        """A call on a group: its ranks divide the rows; its result, or a future of it, is passed on. Raises
        ConfigError for a group that the run does not have."""
        group = self._group(worker_group)
        if isinstance(stage, str):
            method = getattr(group, stage)
            return self._then(lambda value: method(resolve(value)))
        return self._then(lambda value: stage(group, resolve(value)))

    def gather(self, stage: Callable[[object], object]) -> Flow:
        """Wait for the rows of all ranks and apply `stage` to them here."""
        return self._then(lambda value: stage(resolve(value)))

    def all_reduce(self, stage: Callable[[object], object] | str) -> Flow:
        """Reduce the values of all ranks to one for every rank that runs the program. A function is applied to all rows
        (advantages); "sum", "mean", "min" or "max" reduces the results of a call on every rank: numbers, tensors, or mappings
        of these, element by element. Raises ConfigError for another name."""
        if not isinstance(stage, str):
            return self.gather(stage)
        if stage not in _REDUCTIONS:
            hint = nearest(stage, _REDUCTIONS) or f"; there are {', '.join(_REDUCTIONS)}"
            raise ConfigError(f"There is no reduction {stage!r}{hint}")
        return self.gather(partial(_reduced, _REDUCTIONS[stage]))

    def sync(self) -> Any:
        """Run the chain; the result of its last stage, finished."""
        value: Any = None
        for step in self.steps:
            value = step(value)
        return resolve(value)

    def _then(self, step: Step) -> Flow:
        return Flow(self.groups, (*self.steps, step))

    def _group(self, name: str) -> object:
        group = self.groups.get(name)
        if group is None:
            present = [n for n, handle in self.groups.items() if handle is not None]
            hint = nearest(name, present) or f"; there are {', '.join(present)}"
            raise ConfigError(f"The run has no worker group {name!r}{hint}")
        return group


_REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda values: values.sum(0),
    "mean": lambda values: values.mean(0),
    "min": lambda values: values.amin(0),
    "max": lambda values: values.amax(0),
}


def _reduced(reduction: Callable[[torch.Tensor], torch.Tensor], outputs: Any) -> Any:
    values = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
    if isinstance(values[0], Mapping):
        return {name: _reduced(reduction, [value[name] for value in values]) for name in values[0]}
    result = reduction(torch.stack([torch.as_tensor(value, dtype=torch.float64) for value in values]))
    return result.to(values[0].dtype) if isinstance(values[0], torch.Tensor) else result.item()


class Controller(Flow):
    """The beginning of a chain over the roles of a run, and over other groups."""

    def __init__(self, roles: Roles | None = None, **groups: object):
        super().__init__({**(_groups_of(roles) if roles is not None else {}), **groups})


def _groups_of(roles: Roles) -> dict[str, object]:
    """Groups under their names in a chain: {role}_group, and update_group for the actor."""
    models = {f"{name}_group": handle for name, handle in roles.models.items()}
    groups = {"rollout_group": roles.rollout, "update_group": models.get("actor_group"), **models}
    return {**groups, "reward_group": roles.reward}
