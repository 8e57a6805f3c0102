"""Import path of verl.compat.flops."""

from verl.compat.flops import FlopsCounter, get_device_flops

__all__ = ["FlopsCounter", "get_device_flops"]
