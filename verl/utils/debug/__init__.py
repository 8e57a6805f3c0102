"""Import path of verl.compat.tracing: timers."""

from verl.compat.tracing import marked_timer, simple_timer

__all__ = ["marked_timer", "simple_timer"]
