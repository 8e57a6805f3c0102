"""`verl.utils.device`: the accelerator of this machine, under the names that recipes ask for it."""

from __future__ import annotations

import gc
import logging
from typing import Any

import torch

log = logging.getLogger(__name__)

is_cuda_available: bool = torch.cuda.is_available()
is_npu_available: bool = False  # no engine here computes on one


def get_device_name() -> str:
    """ "cuda" where there is a GPU, else "cpu"."""
    return "cuda" if is_cuda_available else "cpu"


def get_torch_device() -> Any:
    """The module of torch for that device: `torch.cuda` or `torch.cpu`."""
    return getattr(torch, get_device_name())


def get_device_id() -> Any:
    """The device that is current: an index on GPUs, and "cpu" on a CPU, as torch says it."""
    return get_torch_device().current_device()


def get_nccl_backend() -> str:
    """The communication backend of that device: "nccl" for GPUs, "gloo" for a CPU."""
    return "nccl" if is_cuda_available else "gloo"


def get_visible_devices_keyword() -> str:
    """The environment variable that limits a process to some of the devices."""
    return "CUDA_VISIBLE_DEVICES"


def auto_set_device(config: Any) -> None:
    """Set `config.trainer.device` to the device of this machine where it names another accelerator; "cpu" and "auto" stay."""
    trainer = getattr(config, "trainer", None)
    chosen = getattr(trainer, "device", None)
    if chosen in (None, "cpu", "auto", get_device_name()):
        return
    log.warning("trainer.device=%s is not on this machine; it is set to %s.", chosen, get_device_name())
    config.trainer.device = get_device_name()


def set_expandable_segments(enable: bool) -> None:
    """Let CUDA's allocator grow its segments in place, or not. Nothing on a CPU."""
    if is_cuda_available:
        torch.cuda.memory._set_allocator_settings(f"expandable_segments:{enable}")


def aggressive_empty_cache(force_sync: bool = True, max_retries: int = 3) -> None:
    """Give cached memory back to the device until a round frees less than 1 GiB, at most `max_retries` rounds; on a CPU
    only Python's garbage is collected."""
    for _ in range(max_retries):
        gc.collect()
        if not is_cuda_available:
            return
        before = torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        if force_sync:
            torch.cuda.synchronize()
        if before - torch.cuda.memory_reserved() < 2**30:
            return
