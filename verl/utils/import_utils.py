"""Import path of verl.compat.imports."""

from verl.compat.imports import (
    deprecated,
    import_external_libs,
    is_megatron_core_available,
    is_nvtx_available,
    is_sglang_available,
    is_trl_available,
    is_vllm_available,
    load_class_from_fqn,
    load_extern_object,
    load_extern_type,
)

__all__ = [
    "deprecated",
    "import_external_libs",
    "is_megatron_core_available",
    "is_nvtx_available",
    "is_sglang_available",
    "is_trl_available",
    "is_vllm_available",
    "load_class_from_fqn",
    "load_extern_object",
    "load_extern_type",
]
