"""Settings of the host process that decide how fast a CPU trains."""

from __future__ import annotations

import ctypes
import logging
import platform

log = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # malloc.h
_KEEP_BYTES = 2**31 - 1  # mallopt takes an int


def keep_freed_memory() -> bool:
    """Tell glibc's allocator to keep large freed blocks for the next allocation instead of giving them back to the kernel.

    Activations and gradients are allocated and freed at the same sizes in every step; by default each large one is mapped
    anew, and the kernel zeroes every page again. Returns whether it was done: False where the C library is not glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    done = all(mallopt(option, value) for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _KEEP_BYTES)))
    log.debug("glibc keeps freed memory: %s", bool(done))
    return bool(done)
