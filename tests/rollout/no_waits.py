"""A guard of code for a device, on tensors of the host: an operation that a GPU's host would wait for is an error."""

import contextlib
import functools

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# operations with a result on the host, or of a shape that the values decide
_WAITING = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "bincount", "_unique2", "unique_dim",
            "unique_consecutive", "argwhere", "grouped_mm_fallback")  # fmt: skip
_READING = ("cpu", "tolist", "numpy", "item", "__bool__", "__int__", "__float__", "__index__", "__array__")


class WaitError(AssertionError):
    """The host would wait for the device."""


class _Calls(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if not _paused and (name in _READING or (name == "to" and _names_host((*args[1:], *kwargs.values())))):
            raise WaitError(f"Tensor.{name} reads a tensor of the device.")
        return func(*args, **kwargs)


def _names_host(settings):
    return any(isinstance(x, str | torch.device) and torch.device(x).type == "cpu" for x in settings)


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if not _paused:
            by_mask = name in ("index", "index_put_", "index_put") and any(
                x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
            )
            counted = name == "repeat_interleave" and kwargs.get("output_size") is None and len(args) < 3
            if name in _WAITING or by_mask or counted:
                raise WaitError(f"{func} makes the host wait for the device.")
        return func(*args, **kwargs)


_paused: list[object] = []


@contextlib.contextmanager
def no_waits():
    """Raise WaitError for what would wait."""
    with _Calls(), _Operations():
        yield


def allowed(function):
    """`function` in a context that allows waits: it stands for a kernel, or moves tensors of the host to the device."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        _paused.append(function)
        try:
            return function(*args, **kwargs)
        finally:
            _paused.pop()

    return call


def guarded(function):
    """`function`, with WaitError for what would wait."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        with no_waits():
            return function(*args, **kwargs)

    return call
