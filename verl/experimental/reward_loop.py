"""Import path of verl.compat.legacy_reward."""

from verl.compat.legacy_reward import migrate_legacy_reward_impl

__all__ = ["migrate_legacy_reward_impl"]
