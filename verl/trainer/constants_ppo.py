"""Import path of verl.compat.environment."""

from verl.compat.environment import get_ppo_ray_runtime_env

__all__ = ["get_ppo_ray_runtime_env"]
