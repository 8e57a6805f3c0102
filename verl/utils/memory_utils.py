"""Import path of verl.compat.devices: memory that is given back."""

from verl.compat.devices import aggressive_empty_cache

__all__ = ["aggressive_empty_cache"]
