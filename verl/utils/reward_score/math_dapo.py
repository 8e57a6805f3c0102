"""Door: the scorer of DAPO's mathematics as reward functions import it."""

from verl.rewards.scorers.math_dapo import compute_score

__all__ = ["compute_score"]
