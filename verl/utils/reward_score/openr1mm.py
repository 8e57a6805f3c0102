"""Import path of verl.rewards.scorers.tagged_math."""

from verl.rewards.scorers.tagged_math import compute_score

__all__ = ["compute_score"]
