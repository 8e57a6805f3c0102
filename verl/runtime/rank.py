"""One process of a run over several: its device and roles, and the layouts of devices that it computes in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from verl.config import FSDPConfig, VerlConfig
from verl.errors import ConfigError
from verl.models.load import load_model_config
from verl.models.parallel.tensor import check_divisible
from verl.parallel.engine_plan import EnginePlan
from verl.parallel.mesh import Mesh
from verl.parallel.placement import Placement
from verl.reshard.grouping import interval_engines
from verl.reshard.layout import TrainingLayout
from verl.rollout.api import holds_weights
from verl.runtime.requirements import Needs


@dataclass
class Seat:
    """A process of the run: who lives in it, and what the whole run is."""

    config: VerlConfig
    placement: Placement
    rank: int
    device: torch.device
    total_steps: int
    data_sources: list[str]
    train: bool = True
    timeout_s: float | None = None  # of the collectives of engines
    device_names: tuple[str, ...] = ()  # by rank, as CUDA_VISIBLE_DEVICES has them; () where they are not needed

    def mesh(self, role: str) -> Mesh | None:
        """How the ranks of an engine are arranged; None where one device holds the model. Raises ConfigError when they
        do not divide as the config asks."""
        ranks = self.placement.devices[role]
        if len(ranks) == 1:
            return None
        config = engine_section(self.config, role)
        return Mesh.of(
            ranks,
            fsdp_size=config.fsdp_size,
            sequence_parallel=config.ulysses_sequence_parallel_size,
            tensor_parallel=config.tensor_parallel_size,
        )

    @cached_property
    def engine_plan(self) -> EnginePlan:
        """How the rollout engine spans devices. Where the ranks themselves compute, those that train too are grouped such that
        what a rank trains lies within what it generates with, as far as that goes with ascending ranks in a group. Raises
        ConfigError when devices do not divide as the config asks."""
        plan = EnginePlan.of(self.config, self.placement)
        training = self.mesh("actor")
        if self.has_own_weights or training is None or set(training.ranks) != set(plan.ranks):
            return plan
        hosts = {rank: rank // self.placement.devices_per_node for rank in plan.ranks}
        experts = engine_section(self.config, "actor").expert_parallel_size
        copies = interval_engines(
            TrainingLayout(training, experts), plan.sizes.tensor, hosts=hosts, by_experts=experts > 1
        )
        order = [rank for (group,) in copies for rank in sorted(group)]  # as process groups number theirs
        return EnginePlan.of(self.config, self.placement, order)

    def rollout_mesh(self) -> Mesh:
        """How the ranks that generate are arranged: those of a "tp" group get the same prompts. Raises ConfigError as
        `engine_plan` does."""
        return self.engine_plan.mesh

    def holds(self, role: str) -> bool:
        return self.rank in self.placement.devices[role]

    @property
    def needs(self) -> Needs:
        return Needs.of(self.config)

    @property
    def shares_weights(self) -> bool:
        """Whether generation uses the training module itself: one process holds the whole policy and generates with it."""
        actor, rollout = self.placement.devices["actor"], self.placement.devices["rollout"]
        return not self.train or (len(actor) == 1 and actor == rollout and not self.has_own_weights)

    @property
    def has_own_weights(self) -> bool:
        """Whether the rollout engine has a copy of the weights, which it is sent whole."""
        return holds_weights(self.config.actor_rollout_ref.rollout.name)


def check_meshes(config: VerlConfig, placement: Placement) -> EnginePlan:
    """The plan of the rollout engine. Raises ConfigError, before anything is started, when devices do not divide as the engines
    ask."""
    seat = Seat(config, placement, 0, torch.device("cpu"), 1, [])
    _check_rollout(config, seat.engine_plan)
    for role in engine_roles(seat):
        seat.mesh(role)
        if shares_reference(config) and placement.devices["reference"] != placement.devices["actor"]:
            raise ConfigError(
                "With LoRA the reference policy is the actor without its adapters, so both are on the same devices. Leave "
                "'reference' out of trainer.placement."
            )
    return seat.engine_plan


def _check_rollout(config: VerlConfig, plan: EnginePlan) -> None:
    """Raise ConfigError when the model does not divide over the devices of a replica."""
    size, model = plan.sizes.tensor, config.actor_rollout_ref.model
    if size == 1:
        return
    try:
        found = load_model_config(model.path, model.trust_remote_code, model.override_config)
        if plan.engine == "native":
            check_divisible(found, size)
        elif found.get_text_config().num_attention_heads % size:
            raise ConfigError(
                f"it has {found.get_text_config().num_attention_heads} attention heads; choose a divisor."
            )
    except ConfigError as error:
        key = f"actor_rollout_ref.rollout.tensor_model_parallel_size={size}"
        raise ConfigError(f"{key} does not fit the model: {error}") from error


def engine_roles(seat: Seat) -> list[str]:
    """Roles of the run that have a training engine, in the order in which all processes make their groups."""
    if not seat.train:
        return []
    wanted = {"actor": True, "reference": seat.needs.reference, "critic": seat.needs.critic}
    return [role for role, needed in wanted.items() if needed]


def shares_reference(config: VerlConfig) -> bool:
    """Whether the reference policy is the actor without its adapters, on the actor's devices."""
    return config.actor_rollout_ref.model.lora_rank > 0


def engine_section(config: VerlConfig, role: str) -> FSDPConfig:
    """The engine settings of actor, reference or critic."""
    if role == "critic":
        return config.critic.fsdp
    group = config.actor_rollout_ref
    return group.ref.fsdp_config if role == "reference" else group.actor.fsdp_config
