"""Tensors that autograd keeps of a layer for its backward: recipes in place of those that are cheap to compute again, and the
layer's input in memory of the host."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch.autograd.graph import saved_tensors_hooks

from verl.parallel.pinned import pinned_bytes

Recipe = Callable[[], torch.Tensor]


@contextmanager
def computed_again(*recipes: tuple[torch.Tensor, Recipe]) -> Iterator[None]:
    """Inside, autograd keeps the recipe of each tensor in place of the tensor and its views. The backward calls the recipe,
    whose result has the strides and values of the tensor."""
    by_memory = {_memory(tensor): recipe for tensor, recipe in recipes}

    def pack(saved: torch.Tensor) -> torch.Tensor | Recipe:
        recipe = by_memory.get(_memory(saved))
        if recipe is None:
            return saved
        return partial(_view, recipe, saved.size(), saved.stride(), int(saved.storage_offset()))

    with saved_tensors_hooks(pack, lambda saved: saved if isinstance(saved, torch.Tensor) else saved()):
        yield


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _view(recipe: Recipe, size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    return recipe().as_strided(size, stride, offset)


class CopyStream:
    """A stream of a GPU for copies to and from pinned memory, beside the stream that computes."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        """Begin a copy behind the work so far; returns its end."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            end: torch.cuda.Event = self._stream.record_event()
        return end

    def wait(self, end: torch.cuda.Event) -> None:
        """Let work from here on begin after the end of a copy."""
        torch.cuda.current_stream().wait_event(end)


@functools.cache
def copy_stream(device: torch.device) -> CopyStream | None:
    """The one stream for copies of `device`; None if it has none."""
    return CopyStream(device) if device.type == "cuda" else None


class HostInputs:
    """Inputs of the layers of one forward, in pinned memory of the host until the backward needs them.

    A layer's input is copied while the layer computes, and is freed on the device when the next layer begins. The backward of a
    layer begins the copy of the input of the layer below. So the device holds two inputs at a time. Buffers on the host serve
    the next forward: only copies in the order of one stream touch them.
    """

    _idle: list[dict[int, torch.Tensor]] = []

    def __init__(self, num_layers: int, stream: CopyStream):
        self._last, self._stream = num_layers - 1, stream
        self._buffers = self._idle.pop() if self._idle else {}
        self._on_device: dict[int, torch.Tensor] = {}
        self._on_host: dict[int, torch.Tensor] = {}
        self._ends: dict[int, torch.cuda.Event] = {}  # of the newest copy of an input

    def __del__(self) -> None:
        self._idle.append(self._buffers)

    def of(self, number: int) -> saved_tensors_hooks:
        """Hooks around a checkpoint of layer `number`, which saves its input."""
        return saved_tensors_hooks(partial(self._leave, number), self._back)

    def _leave(self, number: int, x: torch.Tensor) -> int | torch.Tensor:
        if not x.numel():  # PyTorch 2.9 saves the input and a tensor without values
            return x
        if number - 1 in self._on_device:
            self._stream.wait(self._ends[number - 1])
            del self._on_device[number - 1]
        self._on_device[number] = x
        if number < self._last:  # whose backward comes at once
            self._on_host[number] = self._buffer(number, x)
            self._ends[number] = self._stream.copy(self._on_host[number], x)
        return number

    def _back(self, number: int | torch.Tensor) -> torch.Tensor:
        if isinstance(number, torch.Tensor):
            return number
        self._fetch(number)
        if number in self._ends:
            self._stream.wait(self._ends.pop(number))
        self._fetch(number - 1)
        if number not in self._on_device:
            raise RuntimeError("The inputs of this forward's layers are used up: its backward runs once.")
        return self._on_device.pop(number)

    def _fetch(self, number: int) -> None:
        host = self._on_host.pop(number, None)
        if host is None or number in self._on_device:
            return
        x = torch.empty_like(host, device=self._device)
        self._ends[number], self._on_device[number] = self._stream.copy(x, host), x

    def _buffer(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """Memory of the host for `x`; in steps of an eighth, since micro-batches differ."""
        self._device = x.device
        if number not in self._buffers or self._buffers[number].nbytes < x.nbytes:
            step = 1 << max(0, math.frexp(x.nbytes)[1] - 4)
            self._buffers[number] = pinned_bytes(-(-x.nbytes // step) * step)
        return self._buffers[number][: x.nbytes].view(x.dtype).view(x.shape)
