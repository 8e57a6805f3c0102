"""The roles of a run over several processes, as groups."""

from __future__ import annotations

from typing import Any

from verl.models.load import load_model_config
from verl.parallel.balance import TokenCost
from verl.parallel.mesh import Mesh
from verl.roles.critic import CriticWorker
from verl.roles.policy import ActorWorker, ReferenceWorker
from verl.roles.reward import RewardWorker
from verl.roles.rollout import RolloutWorker
from verl.runtime.build import schedule_of
from verl.runtime.rank import Seat, engine_roles, shares_reference
from verl.runtime.roles import Roles
from verl.runtime.worker_group import Runner, WorkerGroup

_CLASSES: dict[str, type] = {
    "actor": ActorWorker,
    "reference": ReferenceWorker,
    "critic": CriticWorker,
    "rollout": RolloutWorker,
    "reward": RewardWorker,
}


def make_groups(seat: Seat, runner: Runner, facts: dict[str, Any]) -> Roles:
    """A group for every role of the run, whose calls `runner` carries out."""
    config, devices = seat.config, seat.placement.devices
    cost = TokenCost(_hidden_size(seat))
    made: dict[str, Any] = {}
    for role in ("rollout", "reward", *engine_roles(seat)):
        made[role] = WorkerGroup(
            role,
            _CLASSES[role],
            _mesh(seat, role),
            runner,
            schedule=schedule_of(config, role),
            cost=cost,
            beside_rollout=devices[role] == devices["rollout"],
        )
    roles = Roles(**made, facts={**facts, "devices": seat.placement.sentence()})
    roles.num_devices = seat.placement.num_devices
    return roles


def _mesh(seat: Seat, role: str) -> Mesh:
    source = "actor" if role == "reference" and shares_reference(seat.config) else role
    if source == "rollout":
        return seat.rollout_mesh()
    if source == "reward":
        return Mesh.flat(seat.placement.devices[source])
    return seat.mesh(source) or Mesh.flat(seat.placement.devices[source])


def _hidden_size(seat: Seat) -> int:
    model = seat.config.actor_rollout_ref.model
    config = load_model_config(model.path, model.trust_remote_code, model.override_config)
    return int(getattr(config.get_text_config(), "hidden_size", 1024))
