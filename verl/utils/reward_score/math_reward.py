"""Door: the scorer of MATH as reward functions import it."""

from verl.rewards.scorers.boxed import last_boxed_only_string, remove_boxed
from verl.rewards.scorers.equivalence import math_equal as is_equiv
from verl.rewards.scorers.math_reward import compute_score

__all__ = ["compute_score", "is_equiv", "last_boxed_only_string", "remove_boxed"]
