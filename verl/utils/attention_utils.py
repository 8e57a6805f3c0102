"""Import path of verl.compat.unpadding."""

from verl.compat.unpadding import index_first_axis, pad_input, rearrange, unpad_input

__all__ = ["index_first_axis", "pad_input", "rearrange", "unpad_input"]
