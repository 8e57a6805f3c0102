"""Door: the name that `math_reward` had in older releases."""

from verl.rewards.scorers.math_reward import compute_score

__all__ = ["compute_score"]
