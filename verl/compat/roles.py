"""Roles of a run, and the roles that a config needs: `verl.trainer.ppo.utils`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from verl.runtime.user_worker import Worker

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
        """The role of that name. Raises ValueError."""
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


def need_teacher_policy(config: Tree) -> bool:
    """Whether the config distils a teacher."""
    return bool((config.get("distillation") or {}).get("enabled"))


def _maps_roles(mapping: object) -> bool:
    return isinstance(mapping, Mapping) and any(isinstance(key, Role) for key in mapping)
