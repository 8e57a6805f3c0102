"""Ops that Triton computes on GPUs where it is installed, and torch computes everywhere else.

Callers see one op of torch's dispatcher, whichever implementation runs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from torch._ops import OpOverload

log = logging.getLogger(__name__)

_LIBRARY = torch.library.Library("verl", "FRAGMENT")


def kernel(schema: str, by_torch: Callable[..., object], by_triton: str) -> OpOverload:
    """The op verl::NAME of `schema`, which begins with NAME. `by_triton` is "file:function" in this folder, imported at the
    first call on a GPU, for first arguments in other dtypes than float64. Neither implementation is differentiated; see
    torch.library.register_autograd."""
    _LIBRARY.define(schema)
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, by_torch, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, _on_gpu(by_torch, by_triton), "CUDA")
    return cast("OpOverload", getattr(torch.ops.verl, name).default)


def differentiate(op: OpOverload, backward: Callable[..., object], save: Callable[..., None]) -> None:
    """Give `op` of `kernel` a gradient, as torch.library.register_autograd does."""
    torch.library.register_autograd(op, backward, setup_context=save, lib=_LIBRARY)


def _on_gpu(by_torch: Callable[..., object], by_triton: str) -> Callable[..., object]:
    def launch(first: torch.Tensor, *others: object) -> object:
        with torch.cuda.device_of(first):
            return load(by_triton)(first, *others)

    kernel_or_torch = with_fallback(launch, by_torch, by_triton)

    def call(first: torch.Tensor, *others: object) -> Any:
        has_kernel = first.dtype != torch.float64 and has_triton()
        return (kernel_or_torch if has_kernel else by_torch)(first, *others)

    return call


def with_fallback(compiled: Callable[..., object], plain: Callable[..., object], name: str) -> Callable[..., object]:
    """A function that calls `compiled` until it fails, and then `plain`. Raises OutOfMemoryError of the former, and its
    errors while a CUDA graph is captured."""
    has_failed = False

    @functools.wraps(plain)
    def call(*args: object) -> Any:
        nonlocal has_failed
        if not has_failed:
            try:
                return compiled(*args)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a compiler fails in many ways, and none of them may cost the run
                if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                    raise  # the capture has failed, and the compiler works
                log.warning("%s runs without its compiler (%s: %s)", name, type(error).__name__, str(error)[:200])
                has_failed = True
        return plain(*args)

    return call


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def load(path: str) -> Callable[..., Any]:
    """The Triton implementation "file:function"; imports triton."""
    file, _, function = path.partition(":")
    return cast("Callable[..., object]", getattr(importlib.import_module(f"verl.models.ops.triton.{file}"), function))
