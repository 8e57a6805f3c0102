"""Import path of verl.compat.models."""

from verl.compat.models import (
    compute_position_id_with_mask,
    convert_weight_keys,
    extract_multi_modal_inputs,
    get_generation_config,
    get_model_size,
    print_model_size,
    update_model_config,
)

__all__ = [
    "compute_position_id_with_mask",
    "convert_weight_keys",
    "extract_multi_modal_inputs",
    "get_generation_config",
    "get_model_size",
    "print_model_size",
    "update_model_config",
]
