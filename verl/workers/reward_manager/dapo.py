"""Import path of verl.compat.reward_managers."""

from verl.compat.reward_managers import DAPORewardManager

__all__ = ["DAPORewardManager"]
