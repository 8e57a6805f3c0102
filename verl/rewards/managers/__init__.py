"""Reward managers: requests in, shaped scores out. `build_reward_manager` builds the manager that the config names."""

from verl.families import REWARD_MANAGERS
from verl.rewards.managers.api import RewardManager
from verl.rewards.managers.build import build_reward_manager, function_spec

__all__ = ["REWARD_MANAGERS", "RewardManager", "build_reward_manager", "function_spec"]
