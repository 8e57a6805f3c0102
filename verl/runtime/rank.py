"""One process of a run: its device, the roles placed on it, and the device meshes that it computes in."""

import os
from dataclasses import dataclass
from functools import cached_property

import torch

from verl.config import full_key
from verl.config.active_keys import reuse_obstacle
from verl.config.sections.megatron import MegatronConfig
from verl.engines.api import ENGINES, require_library
from verl.engines.groups import mesh_sizes
from verl.errors import ConfigError
from verl.families import engine_facts
from verl.models.load import load_model_config
from verl.parallel.device import compute_dtype
from verl.parallel.engine_plan import EnginePlan
from verl.parallel.mesh import Mesh
from verl.parallel.placement import Placement
from verl.reshard.grouping import interval_engines
from verl.reshard.layout import MegatronLayout, TrainingLayout, replicas
from verl.roles.api import RoleSpec, RoleSpecs, WorkerSpec
from verl.rollout.api import ENGINES as ROLLOUT_ENGINES
from verl.specs import RolloutSpec

POLICY = "actor"  # the role with the weights of the rollout


@dataclass
class RankContext:
    """A process of the run, and the facts that its roles are built from. `rank` is -1 in a driver: it holds no role."""

    specs: RoleSpecs
    placement: Placement
    rank: int
    device: torch.device
    total_steps: int
    data_sources: list[str]
    device_names: tuple[str, ...] = ()  # by rank, as CUDA_VISIBLE_DEVICES has them; () if they are not needed

    def spec(self, role: str) -> RoleSpec:
        """The declaration of a model role, or of the role that shares its engine."""
        spec = self.specs.model(role)
        assert spec is not None, role
        return spec if spec.shares is None else self.spec(spec.shares)

    @property
    def rollout(self) -> RolloutSpec:
        """The declaration of the role that generates, in a run that has one."""
        assert self.specs.rollout is not None
        return self.specs.rollout

    def ranks(self, role: str) -> tuple[int, ...]:
        """The ranks of a role."""
        spec = self.specs.model(role)
        return self.placement.devices[role if spec is None else self.spec(role).name]

    def mesh(self, role: str) -> Mesh | None:
        """The arrangement of the ranks of an engine; None if one device holds the model. Raises ConfigError when they do not
        divide as the config asks."""
        ranks = self.ranks(role)
        if len(ranks) == 1:
            return None
        spec = self.spec(role)
        if spec.settings is not None:
            return Mesh.grid(ranks, **spec.settings.sizes(len(ranks)))
        return Mesh.of(ranks, **mesh_sizes(spec.engine, len(ranks)))

    def worker_mesh(self, spec: WorkerSpec) -> Mesh | None:
        """The arrangement of the ranks of a worker that train together."""
        ranks = self.ranks(spec.name)
        if spec.engine is None or len(ranks) == 1:
            return None
        return Mesh.of(ranks, **mesh_sizes(spec.engine, len(ranks)))

    def training_layout(self, role: str) -> TrainingLayout:
        """The part of each tensor that a rank of `role` trains."""
        spec, mesh = self.spec(role), self.mesh(role)
        if mesh is None:
            return TrainingLayout(Mesh.flat(self.ranks(role)))
        if not isinstance(spec.settings, MegatronConfig):
            return TrainingLayout(mesh, spec.engine.expert_parallel_size)
        model = load_model_config(spec.model.path, spec.model.trust_remote_code, spec.model.override_config)
        return MegatronLayout(
            replicas(mesh),
            spec.settings.expert_model_parallel_size,
            spec.settings.layers_per_stage(model.get_text_config().num_hidden_layers),
            expert_tensor_parallel=spec.settings.expert_tensor_size(),
        )

    def holds(self, role: str) -> bool:
        return self.rank in self.ranks(role)

    @cached_property
    def engine_plan(self) -> EnginePlan:
        """The layout of the rollout engine over devices. If the ranks themselves compute, ranks that also train are grouped by
        their training shards. The weights that a rank trains then lie within the weights that it generates with, as far as
        ascending ranks in a group allow. Raises ConfigError when devices do not divide as the config asks."""
        plan = EnginePlan.of(self.rollout, self.placement)
        training = self.mesh(POLICY) if self.trains_policy else None
        if self.has_own_weights or training is None or set(training.ranks) != set(plan.ranks):
            return plan
        nodes = {rank: rank // self.placement.devices_per_node for rank in plan.ranks}
        layout = self.training_layout(POLICY)
        copies = interval_engines(layout, plan.sizes.tensor, hosts=nodes, by_experts=layout.expert_parallel > 1)
        order = [rank for group in copies for rank in sorted(group)]  # as process groups number theirs
        return EnginePlan.of(self.rollout, self.placement, order)

    def rollout_mesh(self) -> Mesh:
        """The mesh of the ranks that generate; the ranks of a "tp" group get the same prompts. Raises ConfigError as
        `engine_plan` does."""
        return self.engine_plan.mesh

    @property
    def trains_policy(self) -> bool:
        return self.specs.model(POLICY) is not None

    @property
    def shares_weights(self) -> bool:
        """Whether generation uses the training module itself: one process holds all of the policy and generates with it."""
        devices = self.placement.devices
        alone = len(devices[POLICY]) == 1 and devices[POLICY] == devices["rollout"]
        return not self.trains_policy or (alone and not self.has_own_weights)

    def reads_records(self, role: str) -> bool:
        """Whether updates of `role`, on several ranks, may take activations that the same ranks have recorded while they
        sampled (verl/models/decoder/reuse.py)."""
        if (
            role != POLICY
            or self.specs.rollout is None
            or self.placement.devices[role] != self.placement.devices["rollout"]
        ):
            return False
        is_whole = not self.has_own_weights and self.engine_plan.sizes.tensor == 1
        is_narrow = compute_dtype(self.rollout.dtype, self.device) == torch.bfloat16
        return self.device.type == "cpu" and is_whole and is_narrow and reuse_obstacle(self.rollout.section) is None

    @property
    def has_own_weights(self) -> bool:
        """Whether the rollout engine has a copy of the weights, and gets all of them."""
        return engine_facts(self.rollout.section.name).holds_weights


def check_meshes(specs: RoleSpecs, placement: Placement, rank: int | None = None) -> EnginePlan | None:
    """The layout of the rollout engine, if there is one. Raises ConfigError, before anything is started, when devices do not
    divide as the engines ask, MissingExtraError for an engine that is not installed. `rank`: of this process; None in a driver:
    its ranks may have other packages."""
    context = RankContext(specs, placement, rank or 0, torch.device("cpu"), 1, [])
    if rank is not None:
        require_packages(context)
    # before the layout of the rollout engine: with Megatron it reads the model's config
    for spec in specs.models:
        _check_engine(context, spec)
    if specs.rollout is not None:
        _check_rollout(specs.rollout, context.engine_plan)
    for spec in specs.models:
        context.mesh(spec.name)
        if spec.shares is not None and placement.devices[spec.name] != placement.devices[spec.shares]:
            raise ConfigError(
                f"The role {spec.name} is the {spec.shares} without its LoRA adapters, so both are on the same devices. Leave "
                f"{spec.name!r} out of trainer.placement."
            )
    return None if specs.rollout is None else context.engine_plan


def check_packages(specs: RoleSpecs, placement: Placement) -> None:
    """As `require_packages`, for the first device that generates."""
    rank = placement.devices.get("rollout", (0,))[0]
    require_packages(RankContext(specs, placement, rank, torch.device("cpu"), 1, []))


def require_packages(context: RankContext) -> None:
    """Raise MissingExtraError if this process generates with an engine that is not installed."""
    if context.specs.rollout is not None and context.holds("rollout"):
        section = context.rollout.section
        ROLLOUT_ENGINES.get(section.name).require_package(section)


def _check_engine(context: RankContext, spec: RoleSpec) -> None:
    """Raise MissingExtraError when the engine is not installed, ConfigError when it lacks devices of the run or cannot
    have the role."""
    ranks, num_devices = context.ranks(spec.name), context.placement.num_devices
    num_ranks = len(ranks)
    if spec.settings is None or num_ranks == 1:
        return
    require_library(spec.strategy)
    is_megatron = isinstance(spec.settings, MegatronConfig)
    if ranks != tuple(range(num_ranks)) or (num_ranks < num_devices and not is_megatron):
        devices = "the first devices" if is_megatron else f"all {num_devices} devices"
        raise ConfigError(
            f"strategy={spec.strategy} takes {devices} of a run, and the role {spec.name} is placed on the devices "
            f"{', '.join(map(str, ranks))}. Leave it out of trainer.placement, or set strategy=fsdp2 for it."
        )
    ENGINES.get(spec.strategy).check_role(spec.model, spec.engine, spec.optim, spec.settings, num_ranks)
    for other in context.specs.models:
        if isinstance(spec.settings, MegatronConfig) and isinstance(other.settings, MegatronConfig):
            spec.settings.check_groups(other.settings)
            if context.ranks(other.name) != ranks and len(context.ranks(other.name)) > 1:
                raise ConfigError(
                    f"Roles with strategy=megatron share their devices, and {spec.name} is placed on {num_ranks}, {other.name} "
                    f"on {len(context.ranks(other.name))}. Place them together, or set strategy=fsdp2 for one of them."
                )


def set_queues(specs: RoleSpecs, num_devices: int) -> None:
    """One queue of kernels for Megatron, whose exchanges then begin before the products beside them. CUDA reads the variable
    when a process uses a GPU first. FSDP needs several."""
    if num_devices > 1 and any(isinstance(spec.settings, MegatronConfig) for spec in specs.models):
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _check_rollout(spec: RolloutSpec, plan: EnginePlan) -> None:
    """Raise ConfigError when the model does not divide over the devices of a replica."""
    size, model = plan.sizes.tensor, spec.model
    if size == 1:
        return
    try:
        hf_config = load_model_config(model.path, model.trust_remote_code, model.override_config)
        ROLLOUT_ENGINES.get(plan.engine).require_divisible(hf_config, size)
    except ConfigError as error:
        key = f"{full_key('rollout.tensor_model_parallel_size')}={size}"
        raise ConfigError(f"{key} does not fit the model: {error}") from error
