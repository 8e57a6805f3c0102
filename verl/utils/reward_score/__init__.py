"""The name under which scripts know the built-in scorers."""

from verl.rewards.scorers import gsm8k, math_dapo, math_reward
from verl.rewards.scorers.route import default_compute_score

__all__ = ["default_compute_score", "gsm8k", "math_dapo", "math_reward"]
