"""Import path of verl.compat.sequence_parallel."""

from verl.compat.sequence_parallel import (
    gather_outputs_and_unpad,
    get_ulysses_sequence_parallel_group,
    get_ulysses_sequence_parallel_rank,
    get_ulysses_sequence_parallel_world_size,
    set_ulysses_sequence_parallel_group,
    slice_input_tensor,
    ulysses_pad,
    ulysses_pad_and_slice_inputs,
)

__all__ = [
    "gather_outputs_and_unpad",
    "get_ulysses_sequence_parallel_group",
    "get_ulysses_sequence_parallel_rank",
    "get_ulysses_sequence_parallel_world_size",
    "set_ulysses_sequence_parallel_group",
    "slice_input_tensor",
    "ulysses_pad",
    "ulysses_pad_and_slice_inputs",
]
