"""Import path of verl.compat.metrics."""

from verl.compat.metrics import reduce_metrics

__all__ = ["reduce_metrics"]
