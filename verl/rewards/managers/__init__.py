"""Reward managers: requests in, shaped scores out. `build_reward_manager` builds the manager that the config names."""

from verl.families import REWARD_MANAGERS
from verl.rewards.managers.build import build_reward_manager, function_spec
from verl.rewards.managers.naive import RewardManager

__all__ = ["REWARD_MANAGERS", "RewardManager", "build_reward_manager", "function_spec"]
