"""Memory allocator, idle threads and garbage collector of this process. Torch-free: to be called before torch is imported.

A training step makes and drops tensors of many megabytes. glibc gives each of these back to the system at once, so that the
next one costs a page fault for every 4 KiB, and the kernel zeroes each page first. Here freed memory stays with the process,
with an equal peak. Large tensors lie in huge pages if the system offers them.

Aligned blocks, as tensors are, leave holes between them that older versions of glibc do not fill again: kept memory would grow
by some ten kilobytes a step for as long as a run lasts. So now and then empty pages are given back.
"""

import ctypes
import gc
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# parameters of mallopt, from glibc's malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_TRIM_EVERY = 128  # steps: rare enough that getting pages again costs nothing
# Threads that sleep between two operators cost small steps half their speed. Threads that spin for milliseconds take the
# cores of another process: two generations side by side on two cores fell to a tenth. So they spin for some microseconds.
_SPIN_COUNT = "1000"
_SETTINGS = {_M_MMAP_THRESHOLD: 1 << 30, _M_TRIM_THRESHOLD: (1 << 31) - 1, _M_TOP_PAD: 64 << 20}


def keep_freed_memory(one_arena: bool = False) -> bool:
    """Tell the allocator to keep freed memory for reuse. Does nothing, and returns False, with another C library than glibc, or
    if the user has tuned it (GLIBC_TUNABLES or MALLOC_... in the environment).

    `one_arena` is for a process that computes on another thread than its first: the arenas of other threads give large tensors
    back with any settings."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch asks for huge pages from 2 MiB on
    tuned = any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ)
    if tuned or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = {**_SETTINGS, _M_ARENA_MAX: 1} if one_arena else _SETTINGS
    taken = [mallopt(parameter, value) == 1 for parameter, value in settings.items()]
    _kept.update(keeps=True)
    return all(taken)


_kept = {"keeps": False, "step": 0}  # of this process


def give_back_holes(step: int) -> bool:
    """At the end of every 128th step of a process that keeps freed memory: empty pages go back to the system. Returns whether
    that was done; once for each step, however many callers ask."""
    if not _kept["keeps"] or step % _TRIM_EVERY or step == _kept["step"]:
        return False
    _kept["step"] = step
    return bool(ctypes.CDLL(None).malloc_trim(0))


def spin_briefly() -> bool:
    """Set the environment so that torch's threads spin briefly and then sleep, unless the user has set how they wait. Returns
    whether a setting is in force: False if torch is imported already, without one."""
    if any(name in os.environ for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")):
        return True
    if "torch" in sys.modules:
        return False
    os.environ["GOMP_SPINCOUNT"] = _SPIN_COUNT
    return True


@contextmanager
def imports_stay() -> Iterator[None]:
    """Import modules without garbage collection. Later collections pass over the million objects of torch and transformers.
    These cost a quarter of the time of the import, and a quarter of a second of every full collection. If torch is imported
    already, tensors of the user may be garbage, and nothing is passed over."""
    is_first = "torch" not in sys.modules
    with without_collection():
        yield
        if is_first:
            gc.freeze()


@contextmanager
def without_collection() -> Iterator[None]:
    """Hold back Python's garbage collection inside, in all threads."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
