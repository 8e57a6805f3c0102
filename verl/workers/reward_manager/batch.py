"""Import path of verl.compat.reward_managers."""

from verl.compat.reward_managers import BatchRewardManager

__all__ = ["BatchRewardManager"]
