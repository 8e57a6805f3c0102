"""Ops that Triton computes on GPUs where it is installed, and torch computes everywhere else.

Callers see one op of torch's dispatcher, whichever implementation runs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

log = logging.getLogger(__name__)

_LIBRARY = torch.library.Library("verl", "FRAGMENT")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def kernel(schema: str, by_torch: Callable[..., Any], by_triton: str) -> OpOverload:
    """The op verl::NAME of `schema`, which begins with NAME. `by_triton` is "file:function" in this folder, imported at the
    first call on a GPU. torch computes what is not float32, bfloat16 or float16 by its first argument. Neither
    implementation is differentiated; see torch.library.register_autograd."""
    _LIBRARY.define(schema)
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, by_torch, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, _OnGpu(by_torch, by_triton), "CUDA")
    op: OpOverload = getattr(torch.ops.verl, name).default
    return op


def differentiate(op: OpOverload, backward: Callable[..., Any], save: Callable[..., None]) -> None:
    """Give `op` of `kernel` a gradient, as torch.library.register_autograd does."""
    torch.library.register_autograd(op, backward, setup_context=save, lib=_LIBRARY)


class _OnGpu:
    """Calls the Triton implementation, or torch's from the first failure of Triton on."""

    def __init__(self, by_torch: Callable[..., Any], by_triton: str):
        self._by_torch, self._by_triton, self._failed = by_torch, by_triton, False

    def __call__(self, first: torch.Tensor, *others: Any) -> Any:
        if self._failed or first.dtype not in _DTYPES or not has_triton():
            return self._by_torch(first, *others)
        try:
            with torch.cuda.device_of(first):
                return load(self._by_triton)(first, *others)
        except Exception as error:  # a compiler fails in many ways, and none of them may cost the run
            if isinstance(error, torch.OutOfMemoryError):
                raise
            log.warning("%s runs without Triton (%s: %s)", self._by_triton, type(error).__name__, str(error)[:200])
            self._failed = True
        return self._by_torch(first, *others)


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def load(path: str) -> Callable[..., Any]:
    """The Triton implementation "file:function"; imports triton."""
    file, _, function = path.partition(":")
    implementation: Callable[..., Any] = getattr(importlib.import_module(f"verl.models.cuda.{file}"), function)
    return implementation
