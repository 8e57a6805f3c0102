"""Import path of verl.compat.precision."""

from verl.compat.precision import PrecisionType

__all__ = ["PrecisionType"]
