"""`TaskRunner` and `run_ppo`: the entry point of the existing trainer, which recipes subclass. It starts without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl.compat.roles import Role
from verl.compat.workers import ActorRolloutRefWorker, CriticWorker, RewardModelWorker
from verl.errors import ConfigError

if TYPE_CHECKING:
    from verl.compat.roles import Tree

_RUNNER_HOOKS = (
    "add_actor_rollout_worker", "add_critic_worker", "add_ref_policy_worker", "add_reward_model_resource_pool",
    "add_reward_model_worker", "add_teacher_model_resource_pool", "init_resource_pool_mgr",
)  # fmt: skip
INSTEAD = (
    "The program builds workers, loaders and rewards from the config. Register a function (register_adv_est, "
    "register_policy_loss, custom_reward_function.path, data.custom_cls.path), override fit, or write a program: "
    "docs/coming-from-verl.md."
)


class Pools:
    """The devices of a run, where scripts have a ResourcePoolManager."""

    def __init__(self, trainer: Any):
        self.num_devices = trainer.nnodes * trainer.n_gpus_per_node

    def get_n_gpus(self) -> int:
        return int(self.num_devices)


class BaseTaskRunner:
    """Names the roles of a run for `RayPPOTrainer`. Subclasses define `run(config)`; the classes of workers that the methods
    return stand for roles and do not run."""

    def __init__(self) -> None:
        self.role_worker_mapping: dict[Role, object] = {}
        self.mapping: dict[Role, str] = {}

    def add_actor_rollout_worker(self, config: Tree) -> tuple[type, type]:
        """(class of the actor's worker, class of its group)."""
        from verl.runtime.worker_group import WorkerGroup

        self._add(Role.ActorRollout, ActorRolloutRefWorker)
        return ActorRolloutRefWorker, WorkerGroup

    def add_critic_worker(self, config: Tree) -> None:
        self._add(Role.Critic, CriticWorker)

    def add_ref_policy_worker(self, config: Tree, ref_policy_cls: object) -> None:
        """Only the config decides whether there is a reference policy; `ref_policy_cls` names a role."""
        self._add(Role.RefPolicy, ref_policy_cls)

    def add_reward_model_worker(self, config: Tree) -> None:
        self._add(Role.RewardModel, RewardModelWorker)

    def add_reward_model_resource_pool(self, config: Tree) -> None:
        self.mapping[Role.RewardModel] = "reward_pool"

    def add_teacher_model_resource_pool(self, config: Tree) -> None:
        """The config places teachers."""

    def init_resource_pool_mgr(self, config: Tree) -> Pools:
        """The devices that the config names."""
        return Pools(config.trainer)

    def run(self, config: object) -> None:
        """Train by `config`."""
        raise NotImplementedError(f"{type(self).__name__} defines no run(config).")

    def _add(self, role: Role, worker_class: object) -> None:
        self.role_worker_mapping[role], self.mapping[role] = worker_class, "global_pool"


class TaskRunner(BaseTaskRunner):
    """`run(config)` trains. A subclass that overrides how roles are chosen and not `run` is refused: nothing would call it."""

    def run(self, config: object) -> None:
        """Train by `config`. Raises the errors of `verl train`."""
        from verl.compat.sections import loaded_config
        from verl.run.host import train

        refuse_overrides(self, TaskRunner, _RUNNER_HOOKS)
        train(loaded_config(config))


def run_ppo(config: object, task_runner_class: object = None) -> None:
    """Train by `config` (OmegaConf, a dict or dataclasses of verl.config), on the runtime that it names.
    `task_runner_class` is TaskRunner or a subclass, also one made by `ray.remote`. Raises the errors of `verl train`."""
    runner = undecorated(task_runner_class) if task_runner_class is not None else TaskRunner
    runner().run(config)


def undecorated(cls: object) -> Any:
    """The class that `ray.remote` has wrapped."""
    return getattr(getattr(cls, "__ray_metadata__", None), "modified_class", cls)


def refuse_overrides(obj: object, base: type, hooks: tuple[str, ...]) -> None:
    """Raises ConfigError where a subclass of `base` overrides one of `hooks`, which nothing would call."""
    for cls in type(obj).__mro__[: type(obj).__mro__.index(base)]:
        for name in hooks:
            if name in vars(cls):
                raise ConfigError(f"{cls.__name__}.{name} would not be called. {INSTEAD}")
