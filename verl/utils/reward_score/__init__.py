"""The name under which scripts know the built-in scorers."""

from verl.rewards.scorers.route import default_compute_score
from verl.utils.reward_score import gsm8k, math_dapo, math_reward

__all__ = ["default_compute_score", "gsm8k", "math_dapo", "math_reward"]
