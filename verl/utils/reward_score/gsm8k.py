"""Door: the scorer of GSM8K as reward functions import it."""

from verl.rewards.scorers.gsm8k import compute_score, extract_solution

__all__ = ["compute_score", "extract_solution"]
