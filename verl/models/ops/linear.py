"""Matmuls of the hand-written passes, and the one place that decides their dtype.

A bfloat16 matmul sums exact products in float32 and rounds once. A CPU without fast instructions for it takes longer than for
float32, up to four times, so there the operands are widened first: the same sums, rounded the same way. If oneDNN
multiplies float32 matrices faster than the library behind `torch.mm`, a CPU takes it. If compiled kernels compute the passes in
bfloat16, they also multiply: 7% faster than oneDNN, and gradients of weights are summed in float32 without a rounded copy.
"""

from __future__ import annotations

import torch

from verl.models.ops import compiled
from verl.parallel.device import native_bf16, prefers_onednn

_PRODUCT_ELEMENTS = 1 << 24  # of a matmul that cannot write into its result
_ADDED_ELEMENTS = 1 << 21  # of a matmul with a rounded result that is added: it stays in a cache


def wide_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [tokens, inputs] weight^T [inputs, outputs] in float32 or wider, not rounded to a narrower dtype on a GPU."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return _product(x, weight.t(), wide).to(wide)


def _product(a: torch.Tensor, b: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """a b, on a GPU in the dtype `wide`, elsewhere rounded to the operands' dtype."""
    return torch.mm(a, b, out_dtype=wide) if a.device.type == "cuda" and a.dtype != wide else torch.mm(a, b)


class Matmul:
    """Matmuls in `dtype` on `device`. Arguments have that dtype or come from `operand`, to be called once for a matrix that
    several matmuls read; results are rounded to `dtype`. Without `compiles` torch multiplies: for few rows, since their time is
    reading the weights."""

    def __init__(self, dtype: torch.dtype, device: torch.device, compiles: bool = True):
        self.dtype = dtype
        self.widens = dtype == torch.bfloat16 and device.type == "cpu" and not native_bf16(device)
        self.by_kernels = (
            compiles and dtype == torch.bfloat16 and compiled.usable(torch.empty(0, dtype=dtype, device=device))
        )
        self.by_onednn = (self.widens or dtype == torch.float32) and prefers_onednn(device)

    def operand(self, x: torch.Tensor) -> torch.Tensor:
        """`x` in the dtype of the operands."""
        return x.float() if self.widens else x

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [tokens, inputs] weight^T [inputs, outputs] of two operands, in their dtype."""
        if self.by_onednn:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
            return y
        return compiled.multiply(x, weight.t()) if self.by_kernels else torch.mm(x, weight.t())

    def product_into(self, buffer: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [tokens, inputs] weight^T [inputs, outputs] of two operands, in the first rows of `buffer`; returns them."""
        out = buffer[: len(x)]
        if self.by_onednn:  # it cannot write into a tensor
            size = max(1, _PRODUCT_ELEMENTS // len(weight))
            for part in range(0, len(out), size):
                out[part : part + size] = self.product(x[part : part + size], weight)
        elif self.by_kernels and out.dtype == self.dtype:
            compiled.add_product(out, x, weight.t(), overwrite=True)
        elif x.dtype == out.dtype:
            torch.mm(x, weight.t(), out=out)
        else:
            out.copy_(self.product(x, weight) if self.by_kernels else _product(x, weight.t(), out.dtype))
        return out

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [tokens, inputs] weight^T [inputs, outputs] + bias, and the sum of that with `residual`. In 16 bits the
        matmul is rounded before the residual is added, as when a module computes them."""
        x, weight = self.operand(x), self.operand(weight)
        if self.by_onednn:
            y = self.product(x, weight)
            y = y if bias is None else y.add_(self.operand(bias))
        elif self.by_kernels:
            y = compiled.multiply(x, weight.t(), bias)
        elif residual is not None and self.dtype.itemsize > 2:
            y = torch.addmm(residual, x, weight.t())
            return y if bias is None else y.add_(bias)
        else:
            y = torch.mm(x, weight.t()) if bias is None else torch.addmm(self.operand(bias), x, weight.t())
        y = y.to(self.dtype)
        return y if residual is None else y.add_(residual)

    def input_gradient(self, d_y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """d_y [tokens, outputs] weight [outputs, inputs]."""
        return self.product(self.operand(d_y), self.operand(weight).t()).to(self.dtype)

    def add_outer(self, total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, overwrite: bool) -> None:
        """total += a^T b, or = with `overwrite`; total [outputs, inputs] is float32 or wider, and the matmul is not
        rounded before it is added if the hardware allows."""
        a, b = self.operand(a).t(), self.operand(b)
        if self.by_kernels and total.dtype == torch.float32:
            compiled.add_product(total, a, b, overwrite=overwrite)
            return
        if total.dtype == a.dtype:
            torch.mm(a, b, out=total) if overwrite else total.addmm_(a, b)
            return
        size = len(total) if total.device.type == "cuda" else max(1, _ADDED_ELEMENTS // total.shape[1])
        for start in range(0, len(total), size):
            part = total[start : start + size]
            product = _product(a[start : start + size], b, total.dtype)
            part.copy_(product) if overwrite else part.add_(product)

    def grouped(self, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """x [rows, inputs], sorted by expert, -> [rows, outputs]: the rows of expert e end before `ends[e]`, and `weight` is
        [experts, outputs, inputs]."""
        out = x.new_empty(len(x), weight.shape[1])
        for expert, rows in enumerate(_rows(ends)):
            if rows.start < rows.stop:
                out[rows] = self.linear(x[rows], weight[expert])
        return out

    def add_grouped(
        self, total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor, *, overwrite: bool
    ) -> None:
        """`add_outer` of the rows of each expert, as `grouped` has them, to its part of total [experts, outputs, inputs]."""
        for part, rows in zip(total, _rows(ends), strict=True):
            if rows.start < rows.stop:
                self.add_outer(part, a[rows], b[rows], overwrite=overwrite)
            elif overwrite:
                part.zero_()


def _rows(ends: torch.Tensor) -> list[slice]:
    stops = ends.tolist()
    return [slice(first, stop) for first, stop in zip([0, *stops], stops, strict=False)]
