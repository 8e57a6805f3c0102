"""Door: the scorer of DAPO's mathematics as reward functions import it."""

from verl.rewards.scorers.boxed import last_boxed_only_string, normalize_final_answer, remove_boxed
from verl.rewards.scorers.math_dapo import compute_score

__all__ = ["compute_score", "last_boxed_only_string", "normalize_final_answer", "remove_boxed"]
