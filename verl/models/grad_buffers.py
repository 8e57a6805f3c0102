"""Buffers of hand-written backwards, for sums of the gradients of weights in place, in at least float32.

Autograd passes a gradient as a new tensor that is then added to the existing one. For a large matrix that is one
more tensor and three more passes over memory than the product itself. Here each product is added directly to the
buffer, the first one overwrites it, and the parameter's `grad` is a view of the buffer. So `grad` keeps its meaning:
None before the first micro-batch, and setting it to None starts a new sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from verl.models.ops.linear import Matmul


class GradientBuffers:
    """Buffers for the parameters among the keys of `holders`; other parameters get no gradient. The value is the object whose
    `grad` is set: the parameter itself, or its wider master.

    Methods take `parameters` with weights back to back in one tensor: their gradients do too.
    """

    def __init__(self, holders: Mapping[nn.Parameter, Any]):
        self._holders = dict(holders)
        self._buffers: dict[tuple[nn.Parameter, ...], torch.Tensor] = {}
        self._scratch, self._is_lent = torch.empty(0), False

    @classmethod
    def apart(cls, parameters: Iterable[Any]) -> GradientBuffers:
        """Buffers for gradients that are not to be attached but taken."""
        return cls({p: SimpleNamespace(grad=None) for p in parameters})

    @classmethod
    def rest(
        cls, attached: GradientBuffers | None, parameters: Sequence[Any], needed: Sequence[bool]
    ) -> GradientBuffers:
        """Buffers as of `apart`, for those of the `needed` parameters that `attached` does not want."""
        pairs = zip(parameters, needed, strict=True)
        return cls.apart(p for p, needs in pairs if needs and not (attached is not None and attached.wants((p,))))

    def take(self, parameter: Any) -> torch.Tensor | None:
        """The gradient of one parameter in that parameter's format, or None when there is none."""
        grad = self._holders[parameter].grad if parameter in self._holders else None
        return None if grad is None else grad.to(parameter.dtype)

    def wants(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether any of them is to get a gradient."""
        return any(p in self._holders for p in parameters)

    def add_matmul(self, parameters: Sequence[nn.Parameter], a: torch.Tensor, b: torch.Tensor, by: Matmul) -> None:
        """Add `a^T b`, for a [tokens, outputs] and b [tokens, inputs]."""
        if self.wants(parameters):
            buffer, is_new = self._open(parameters)
            by.add_outer(buffer, a, b, overwrite=is_new)

    def add_grouped(
        self, parameter: nn.Parameter, a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor, by: Matmul
    ) -> None:
        """Add `a^T b` of the rows of each expert to its part of a parameter [experts, outputs, inputs]; see Matmul.grouped."""
        if self.wants((parameter,)):
            buffer, is_new = self._open((parameter,))
            by.add_grouped(buffer, a, b, ends, overwrite=is_new)

    def add(self, parameters: Sequence[nn.Parameter], value: torch.Tensor) -> None:
        """Add `value`, of the shape of the joined parameters."""
        if self.wants(parameters):
            buffer, is_new = self._open(parameters)
            if is_new:
                buffer.copy_(value)
            else:
                buffer.add_(value)

    def add_rows(self, parameter: nn.Parameter, index: torch.Tensor, rows: torch.Tensor) -> None:
        """Add `rows` [tokens, columns] at the rows `index` [tokens] of one parameter; an index may occur often."""
        if self.wants((parameter,)):
            buffer, is_new = self._open((parameter,))
            if is_new:
                buffer.zero_()
            buffer.index_add_(0, index, rows.to(buffer.dtype))

    def borrow(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """A matrix on the CPU. Once it is given back, the next micro-batch gets the same memory: new pages take longer to clear
        than the matrix takes to fill."""
        if self._is_lent:
            return torch.empty(shape, dtype=dtype)
        if self._scratch.dtype != dtype or self._scratch.numel() < math.prod(shape):
            self._scratch = torch.empty(math.prod(shape), dtype=dtype)
        self._is_lent = True
        return self._scratch[: math.prod(shape)].view(shape)

    def give_back(self, matrix: torch.Tensor) -> None:
        """Return a matrix of `borrow`."""
        self._is_lent = self._is_lent and matrix.data_ptr() != self._scratch.data_ptr()

    def release(self) -> None:
        """Give up the buffers of gradients that have been forgotten (`grad` is None): as much memory as the weights take,
        free for generation until the next update."""
        self._buffers.clear()
        self._scratch, self._is_lent = torch.empty(0), False

    def _new_buffer(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def _open(self, parameters: Sequence[nn.Parameter]) -> tuple[torch.Tensor, bool]:
        """The buffer of `parameters`, attached as their `grad`, and whether its content is to be overwritten."""
        buffer = self._buffers.get(tuple(parameters))
        first, rows = parameters[0], sum(len(p) for p in parameters)
        shape = (rows, *first.shape[1:])
        if buffer is None or buffer.shape != shape:
            held_dtype = next(
                (getattr(self._holders[p], "dtype", None) for p in parameters if p in self._holders), None
            )
            dtype = held_dtype or torch.promote_types(first.dtype, torch.float32)
            buffer = self._buffers[tuple(parameters)] = self._new_buffer(shape, dtype, first.device)
        views = buffer.split([len(p) for p in parameters])
        held = [(self._holders[p], view) for p, view in zip(parameters, views, strict=True) if p in self._holders]
        is_new = all(holder.grad is None for holder, _ in held)
        for holder, view in held:
            if holder.grad is not None and holder.grad.data_ptr() == view.data_ptr():
                continue
            if holder.grad is not None:  # made by autograd, elsewhere
                view.copy_(holder.grad)
            elif not is_new:
                view.zero_()
            holder.grad = view
        return buffer, is_new
