"""The local runtime: every role in this process, on one device. A breakpoint works anywhere."""

from __future__ import annotations

from typing import Any

from verl.config import VerlConfig
from verl.parallel.device import resolve_device
from verl.parallel.placement import Placement
from verl.runtime.build import build_workers
from verl.runtime.mode_switch import Switch, around
from verl.runtime.rank import Seat, check_meshes
from verl.runtime.rank_workers import generation_facts, module_facts
from verl.runtime.roles import Roles
from verl.runtime.sampling import sampling_params

__all__ = ["LocalRuntime", "build_roles", "sampling_params"]


class LocalRuntime:
    """See verl.runtime.api.Runtime."""

    name = "local"
    rank = 0
    leads = True

    def __init__(self, config: VerlConfig):
        self.config = config
        check_meshes(config, Placement.of(config, 1))

    def build_roles(self, *, total_steps: int, data_sources: list[str], train: bool = True) -> Roles:
        return build_roles(self.config, total_steps=total_steps, data_sources=data_sources, train=train)

    def any(self, flag: bool) -> bool:
        return flag

    def from_leader(self, value: Any) -> Any:
        return value

    def close(self) -> None:
        pass


def build_roles(config: VerlConfig, *, total_steps: int, data_sources: list[str], train: bool = True) -> Roles:
    """Load models, start reward processes, and wire the roles of `config` in this process.

    The rollout engine generates with the actor's own module: on one device there is one copy of the weights.
    """
    device = resolve_device(config.trainer.device)
    placement = Placement.from_roles({}, 1)
    seat = Seat(config, placement, 0, device, total_steps, data_sources, train)
    workers = build_workers(seat)

    def end() -> None:
        try:
            workers["reward"].close()
        finally:
            workers["rollout"].close()

    roles = Roles(**workers, end=end)
    if train:
        around(Switch(roles.actor.engine, config.actor_rollout_ref.rollout, device), roles.rollout)
        if seat.has_own_weights:
            publish, trained = roles.rollout.publish, roles.actor.engine
            roles.rollout.publish = lambda version: publish(version, trained.gather_weights())
    roles.facts = module_facts(roles.rollout.engine, device) | generation_facts(roles.rollout.engine)
    return roles
