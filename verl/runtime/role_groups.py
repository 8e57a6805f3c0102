"""The roles of a run as groups of ranks."""

from collections.abc import Callable
from typing import cast

from verl.config import ModelConfig
from verl.errors import ConfigError
from verl.models.load import load_model_config
from verl.models.shapes import ModelShape
from verl.parallel.balance import TokenCost
from verl.parallel.mesh import Mesh
from verl.roles.api import ModelHandle, RewardHandle, Roles, RolloutHandle, WeightSync
from verl.roles.model import ModelRole, schedule_of
from verl.roles.reward import RewardWorker
from verl.roles.rollout import RolloutWorker
from verl.runtime.rank import RankContext
from verl.runtime.worker_group import Runner, WorkerGroup


def make_groups(
    context: RankContext, runner: Runner, facts: dict[str, object], weights: WeightSync | None, end: Callable[[], None]
) -> Roles:
    """A group for every role of the run; `runner` carries out its calls."""
    specs, devices = context.specs, context.placement.devices
    roles = Roles(specs=specs.models, facts=facts, num_devices=context.placement.num_devices, weights=weights, end=end)
    if roles.num_devices > 1:
        roles.facts = {**facts, "devices": context.placement.describe(specs.names)}
    if (main := specs.main) is not None:
        roles.facts["sharding"] = main.describe_sharding(roles.num_devices, without_gpus=context.device.type == "cpu")
    for spec in specs.models:
        mesh = context.mesh(spec.name) or Mesh.flat(context.ranks(spec.name))
        group = WorkerGroup(
            spec.name,
            ModelRole,
            mesh,
            runner,
            schedule=schedule_of(spec),
            cost=_cost(spec.model) if mesh.dp_size > 1 else None,
            beside_rollout=devices[spec.name] == devices.get("rollout"),
            reads_records=context.reads_records(spec.name),
        )
        roles.models[spec.name] = cast(ModelHandle, group)
    for worker in specs.workers:
        roles.workers[worker.name] = WorkerGroup(
            worker.name, worker.worker_class, Mesh.flat(devices[worker.name]), runner
        )
    if specs.rollout is not None:
        group = WorkerGroup("rollout", RolloutWorker, context.rollout_mesh(), runner, beside_rollout=True)
        roles.rollout = cast(RolloutHandle, group)
    if specs.reward is not None:
        mesh = Mesh.flat(devices["reward"])
        group = WorkerGroup(
            "reward", RewardWorker, mesh, runner, beside_rollout=devices["reward"] == devices["rollout"]
        )
        roles.reward = cast(RewardHandle, group)
    return roles


def _cost(model: ModelConfig) -> TokenCost:
    config = load_model_config(model.path, model.trust_remote_code, model.override_config)
    try:
        return TokenCost(*ModelShape.from_config(config.get_text_config()).flops)
    except ConfigError:  # no sizes of a decoder
        return TokenCost()
