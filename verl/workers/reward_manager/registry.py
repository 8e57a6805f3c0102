"""Import path of verl.compat.reward_managers."""

from verl.compat.reward_managers import get_reward_manager_cls, register

__all__ = ["get_reward_manager_cls", "register"]
