"""Import path of verl.compat.reward_managers."""

from verl.compat.reward_managers import NaiveRewardManager

__all__ = ["NaiveRewardManager"]
