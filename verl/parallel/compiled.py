"""Compiled C libraries: their places, and the instruction set of their kernels.

`VERL_CPU_ISA` forces an instruction set (avx512_amx, avx512_bf16, avx512 or avx2), or with `none` torch.
"""

import ctypes
import logging
import os
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TypeVar

from verl.errors import ConfigError

log = logging.getLogger(__name__)
T = TypeVar("T")
INSTRUCTION_SETS = ("avx512_amx", "avx512_bf16", "avx512", "avx2")


def open_library(stem: Path, revision: int | None = None) -> ctypes.CDLL | None:
    """The extension module at `stem`, without its suffix; None in an installation without a compiler, and for a library with
    structures of another `revision`."""
    for suffix in EXTENSION_SUFFIXES:
        path = stem.with_name(stem.name + suffix)
        if path.exists():
            try:
                library = ctypes.CDLL(str(path))
            except OSError:  # built for another system
                return None
            if revision is not None and getattr(library, "kernels_revision", int)() != revision:
                log.warning("%s is of another version of verl, so torch computes. Install verl again.", path.name)
                return None
            return library
    return None


def choose_kernels(find: Callable[[str | None], T | None], is_compiled: bool) -> T | None:
    """The kernels that `find` has for the instruction set of VERL_CPU_ISA, or None if torch computes. Raises ConfigError when
    the variable asks for kernels that are not available."""
    isa = os.environ.get("VERL_CPU_ISA") or None
    if isa == "none":
        return None
    kernels = find(isa)
    if isa is not None and kernels is None:
        why = "this processor lacks it" if isa in INSTRUCTION_SETS and is_compiled else "it cannot be loaded here"
        raise ConfigError(
            f"VERL_CPU_ISA={isa} was asked for, but {why}. Use one of {', '.join(INSTRUCTION_SETS)}, none, or unset it."
        )
    return kernels
