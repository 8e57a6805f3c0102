"""Import path of verl.compat.containers: coroutines."""

from verl.compat.containers import auto_await, get_event_loop

__all__ = ["auto_await", "get_event_loop"]
