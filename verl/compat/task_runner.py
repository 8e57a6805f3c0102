"""Roles of a run, and worker classes as names of roles; `TaskRunner` and `run_ppo`, the entry point that recipes subclass.
It starts without torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from enum import Enum
from inspect import unwrap
from typing import TYPE_CHECKING, Any, TypeAlias

from verl.compat.user_worker import Worker
from verl.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl.config import PPOConfig

    Tree: TypeAlias = PPOConfig | DictConfig


WorkerType = type[Worker]


class Role(Enum):
    """Roles that scripts map to worker classes and resource pools; `str(role)` is the role's name in metrics."""

    Actor = 0
    Rollout = 1
    ActorRollout = 2
    Critic = 3
    RefPolicy = 4
    RewardModel = 5
    ActorRolloutRef = 6
    Env = 7

    def __str__(self) -> str:
        return _NAMES[self.name]

    @classmethod
    def from_string(cls, name: str) -> Role:
        for role in cls:
            if name in (str(role), role.name):
                return role
        raise ValueError(f"There is no role {name!r}; there are {', '.join(_NAMES.values())}.")


_NAMES = {
    "Actor": "actor",
    "Rollout": "rollout",
    "ActorRollout": "actor_rollout",
    "Critic": "critic",
    "RefPolicy": "ref",
    "RewardModel": "rm",
    "ActorRolloutRef": "actor_rollout_ref",
    "Env": "env",
}


def need_reference_policy(config: Tree) -> bool:
    """Whether a KL term needs the reference policy. Releases before 0.7 give a mapping of roles instead of a config."""
    if _maps_roles(config):
        return Role.RefPolicy in config
    return bool(config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss)


def need_reward_model(config: Tree) -> bool:
    """Whether the config enables a reward model, under either spelling; or a mapping of roles as above."""
    if _maps_roles(config):
        return Role.RewardModel in config
    reward = config.get("reward") or {}
    model = reward.get("reward_model") or config.get("reward_model") or {}
    return bool(model.get("enable"))


def need_critic(config: Tree) -> bool:
    """`critic.enable`, or if that is null, whether the advantage estimator reads values. Raises ConfigError for an unknown
    estimator."""
    from verl.algorithms.advantages import requires

    enabled = config.critic.get("enable")
    return "values" in requires(str(config.algorithm.adv_estimator)) if enabled is None else bool(enabled)


def _maps_roles(mapping: object) -> bool:
    return isinstance(mapping, Mapping) and any(isinstance(key, Role) for key in mapping)


WORKERS = (
    "Engines compute here, not worker classes: a subclass of an FSDP or Megatron worker has no part of a run to replace. Name "
    "its loss by register_policy_loss, its model by model.external_lib, or write an engine: CONTRIBUTING.md."
)


class ActorRolloutRefWorker(Worker):
    """The policy, its sampler and its reference. Making one raises ConfigError; `verl.worker` has a class for own loops."""

    def __init__(self, *_: object, **__: object):
        raise ConfigError(f"{type(self).__name__} stands for a role of a run and cannot be made. {WORKERS}")


class AsyncActorRolloutRefWorker(ActorRolloutRefWorker):
    """The same with an asynchronous sampler."""


class CriticWorker(ActorRolloutRefWorker):
    """The value model."""


class RewardModelWorker(ActorRolloutRefWorker):
    """The reward model."""


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
    """The devices of a run, as the ResourcePoolManager of scripts."""

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


_VARIABLES = {
    "TOKENIZERS_PARALLELISM": "true",
    "NCCL_DEBUG": "WARN",
    "VLLM_LOGGING_LEVEL": "WARN",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true",
    "NCCL_CUMEM_ENABLE": "0",
}


NVTX_INJECTION_ENV = "NVTX_INJECTION64_PATH"  # a library that takes the interface of CUDA's profilers


def get_ppo_ray_runtime_env(config: Tree | None = None) -> dict[str, Any]:
    """A `runtime_env` for `ray.init`: variables that are not set, and the working directory of a Ray job. If `config` profiles
    by torch, an inherited NVTX injection is replaced, since only one library can profile, unless VERL_KEEP_NVTX_INJECTION=1."""
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
    variables = {k: v for k, v in _VARIABLES.items() if k not in os.environ}
    environment: dict[str, Any] = {"env_vars": variables}
    if job.get("runtime_env", {}).get("working_dir") is None:
        environment["working_dir"] = None
    tool = ((config.get("global_profiler") or {}) if config is not None else {}).get("tool")
    if tool == "torch" and NVTX_INJECTION_ENV in os.environ and os.environ.get("VERL_KEEP_NVTX_INJECTION") != "1":
        variables[NVTX_INJECTION_ENV] = os.devnull
    return environment


def run_ppo(config: object, task_runner_class: object = None) -> None:
    """Train by `config` (OmegaConf, a dict or dataclasses of verl.config), on the runtime that it names.
    `task_runner_class` is TaskRunner or a subclass, also one made by `ray.remote`. Raises the errors of `verl train`."""
    runner = undecorated(task_runner_class) if task_runner_class is not None else TaskRunner
    runner().run(config)


def undecorated(cls: object) -> Any:
    """The class that `ray.remote` has wrapped."""
    return getattr(getattr(cls, "__ray_metadata__", None), "modified_class", cls)


def refuse_overrides(obj: object, base: type, hooks: tuple[str, ...]) -> None:
    """Raises ConfigError if a subclass of `base` overrides one of `hooks`: nothing would call it. `ray.remote` wraps methods
    that a class inherits."""
    for cls in type(obj).__mro__[: type(obj).__mro__.index(base)]:
        for name in hooks:
            if name in vars(cls) and unwrap(vars(cls)[name]) is not unwrap(getattr(base, name, type)):
                raise ConfigError(f"{cls.__name__}.{name} would not be called. {INSTEAD}")
