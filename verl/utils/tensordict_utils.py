"""Import path of verl.compat.tensordicts."""

from verl.compat.tensordicts import (
    assign_non_tensor,
    assign_non_tensor_data,
    assign_non_tensor_stack,
    chunk_tensordict,
    concat_tensordict,
    get,
    get_keys,
    get_non_tensor_data,
    get_tensordict,
    index_select_tensor_dict,
    make_iterator,
    pop,
    pop_keys,
    union_tensor_dict,
    unwrap_non_tensor_data,
)

__all__ = [
    "assign_non_tensor",
    "assign_non_tensor_data",
    "assign_non_tensor_stack",
    "chunk_tensordict",
    "concat_tensordict",
    "get",
    "get_keys",
    "get_non_tensor_data",
    "get_tensordict",
    "index_select_tensor_dict",
    "make_iterator",
    "pop",
    "pop_keys",
    "union_tensor_dict",
    "unwrap_non_tensor_data",
]
