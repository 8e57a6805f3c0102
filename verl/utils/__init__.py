"""Door: helpers that scripts import from here."""

from verl.parallel.placement import set_device_map

__all__ = ["set_device_map"]
