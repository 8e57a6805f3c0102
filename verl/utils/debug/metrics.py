"""Import path of verl.compat.metrics: trainer against sampler."""

from verl.compat.metrics import calculate_debug_metrics

__all__ = ["calculate_debug_metrics"]
