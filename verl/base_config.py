"""Import path of verl.compat.sections: the base of config dataclasses."""

from verl.compat.sections import BaseConfig

__all__ = ["BaseConfig"]
