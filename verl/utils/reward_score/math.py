"""Door: the name that `math_reward` had in older releases."""

from verl.utils.reward_score.math_reward import compute_score, is_equiv, last_boxed_only_string, remove_boxed

__all__ = ["compute_score", "is_equiv", "last_boxed_only_string", "remove_boxed"]
