"""Import path of verl.rewards.scorers.tool_calls."""

from verl.rewards.scorers.tool_calls import compute_score

__all__ = ["compute_score"]
