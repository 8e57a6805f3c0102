"""Import path of verl.compat.containers: dicts."""

from verl.compat.containers import (
    append_to_dict,
    convert_to_regular_types,
    list_of_dict_to_dict_of_list,
    union_two_dict,
)

__all__ = ["append_to_dict", "convert_to_regular_types", "list_of_dict_to_dict_of_list", "union_two_dict"]
