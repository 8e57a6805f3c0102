"""Import path of verl.compat.reward_managers."""

from verl.compat.reward_managers import AbstractRewardManager, RawRewardFn

__all__ = ["AbstractRewardManager", "RawRewardFn"]
