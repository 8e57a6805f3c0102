"""Door: the scorer of MATH as reward functions import it."""

from verl.rewards.scorers.math_reward import compute_score

__all__ = ["compute_score"]
