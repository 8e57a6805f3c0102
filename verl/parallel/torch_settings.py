"""The settings of torch for the computation of a run, independent of the process's settings."""

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

# Held while transformers loads: it sets the default dtype and patches its classes for all threads of the process.
LOADING = threading.RLock()
os.register_at_fork(after_in_child=LOADING._at_fork_reinit)  # type: ignore[attr-defined]  # its holder stays behind


class _Runs:
    """Of all threads, and the default dtype outside of them."""

    num_entered = 0
    dtype = torch.float32


@contextmanager
def run_settings() -> Iterator[None]:
    """Inside: gradients are on, inference mode and autocast are off, new tensors are float32 and on the CPU, as in a new
    process. On leaving, every setting is what it was before, after any change by code inside. May be nested."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # gradients are on with it
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        stack.callback(_set_device, device := torch.get_default_device())
        if device.type != "cpu":
            stack.enter_context(torch.device("cpu"))
        _enter_dtype(1)
        stack.callback(_enter_dtype, -1)
        yield


def _set_device(device: torch.device) -> None:
    if torch.get_default_device() != device:
        torch.set_default_device(None if device.type == "cpu" else device)


def _enter_dtype(change: int) -> None:
    """The default dtype belongs to all threads: float32 until the last run leaves."""
    with LOADING:
        if _Runs.num_entered == 0:
            _Runs.dtype = torch.get_default_dtype()
        _Runs.num_entered += change
        torch.set_default_dtype(torch.float32 if _Runs.num_entered else _Runs.dtype)
