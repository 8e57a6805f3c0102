"""Import path of verl.compat.devices."""

from verl.compat.devices import (
    auto_set_device,
    get_device_id,
    get_device_name,
    get_nccl_backend,
    get_torch_device,
    get_visible_devices_keyword,
    is_cuda_available,
    is_npu_available,
    set_expandable_segments,
)

__all__ = [
    "auto_set_device",
    "get_device_id",
    "get_device_name",
    "get_nccl_backend",
    "get_torch_device",
    "get_visible_devices_keyword",
    "is_cuda_available",
    "is_npu_available",
    "set_expandable_segments",
]
