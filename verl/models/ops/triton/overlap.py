"""Kernels that start while the kernel before them ends: programmatic dependent launch, on NVIDIA GPUs from Hopper on.

Such a kernel calls `wait` before it reads results of the kernel before it. Each of its programs calls `wait` before it ends, so
that a kernel has ended only after all kernels before it.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def overlap(x: torch.Tensor) -> dict[str, object]:
    """Options of a launch on the device of `x`."""
    return {"OVERLAPS": True, "launch_pdl": True} if _is_hopper(x.device) else {"OVERLAPS": False}


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return (
        device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (9, 0)
    )


@triton.jit
def wait(OVERLAPS: tl.constexpr):
    """Wait until the kernel before has ended, and with it all kernels before that one."""
    if OVERLAPS:
        gdc_wait()


@triton.jit
def start_next(OVERLAPS: tl.constexpr):
    """Let the next kernel start; it still waits for the results of this one."""
    if OVERLAPS:
        gdc_launch_dependents()
