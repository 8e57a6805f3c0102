"""The table of ops: each is a function by torch, with a schema from its annotations, and kernels for devices that have some.

    @op(triton="norm:launch_rms_norm")         on a GPU with Triton, in verl/models/ops/triton
    @op(compiled=_compiled_swiglu)             on a CPU with the compiled kernels of verl/csrc/kernels.c
    def swiglu(gate_up: torch.Tensor) -> torch.Tensor: ...

Callers see one op of torch's dispatcher, verl::swiglu, whichever implementation runs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch

log = logging.getLogger(__name__)
Function = TypeVar("Function", bound=Callable[..., Any])

OPS: dict[str, Any] = {}  # by name, of the modules that are imported
_LIBRARY = torch.library.Library("verl", "FRAGMENT")


def op(
    triton: str = "", compiled: Callable[..., object] | None = None, writes: Sequence[str] = ()
) -> Callable[[Function], Function]:
    """A decorator that makes an op of a function by torch that writes into its arguments `writes`.

    `triton` is "file:function" in the folder triton, imported at the first call on a GPU, for first arguments in other dtypes
    than float64. `compiled` computes on a CPU; it returns NotImplemented for arguments that its kernels do not take. No
    implementation is differentiated; see `differentiate`."""

    def register(by_torch: Function) -> Function:
        name = by_torch.__name__
        _LIBRARY.define(name + torch.library.infer_schema(by_torch, mutates_args=writes))
        _LIBRARY.impl(name, by_torch, "CompositeExplicitAutograd")
        if compiled is not None:
            _LIBRARY.impl(name, _on_cpu(by_torch, compiled), "CPU")
        if triton:
            _LIBRARY.impl(name, _on_gpu(by_torch, triton), "CUDA")
        OPS[name] = registered = getattr(torch.ops.verl, name).default
        registered.by_torch, registered.triton = by_torch, triton
        return cast("Function", registered)

    return register


def by_torch(registered: Function) -> Function:
    """The function by torch of an op, without the dispatcher."""
    return cast("Function", cast("Any", registered).by_torch)


def differentiate(registered: Callable[..., Any], backward: Callable[..., object], save: Callable[..., None]) -> None:
    """Give an op a gradient, as torch.library.register_autograd does."""
    torch.library.register_autograd(cast("Any", registered), backward, setup_context=save, lib=_LIBRARY)


def _on_cpu(by_torch: Callable[..., object], compiled: Callable[..., object]) -> Callable[..., object]:
    def call(*args: object) -> object:
        result = compiled(*args)
        return by_torch(*args) if result is NotImplemented else result

    return call


def _on_gpu(by_torch: Callable[..., object], by_triton: str) -> Callable[..., object]:
    """The kernel until it fails, and then torch. Raises OutOfMemoryError, and errors while a CUDA graph is captured."""
    has_failed = False

    def call(first: torch.Tensor, *arguments: object) -> object:
        nonlocal has_failed
        if has_failed or first.dtype == torch.float64 or not has_triton():
            return by_torch(first, *arguments)
        try:
            with torch.cuda.device_of(first):
                return load(by_triton)(first, *arguments)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler fails in many ways, and none of them may cost the run
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise  # the capture has failed, and the compiler works
            log.warning("%s runs without its compiler (%s: %s)", by_triton, type(error).__name__, str(error)[:200])
            has_failed = True
        return by_torch(first, *arguments)

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
