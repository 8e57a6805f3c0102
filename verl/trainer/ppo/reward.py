"""Import path of verl.compat.rewards."""

from verl.compat.rewards import (
    compute_reward,
    compute_reward_async,
    extract_reward,
    get_custom_reward_fn,
    load_reward_manager,
)

__all__ = ["compute_reward", "compute_reward_async", "extract_reward", "get_custom_reward_fn", "load_reward_manager"]
