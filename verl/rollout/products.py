"""How the dense forward multiplies by weights: where they lie, or by a copy arranged for the matrix library.

A decode step multiplies few rows by every weight of the model, and the library spends a fifth of that on rearranging
weights as it goes (at 8 rows nearly half). MKL takes weights that were arranged once; that costs a copy of them, and as
long as two decode steps. With it a row's product also is the same bits whatever other rows are computed with it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from functools import partial

import torch

from verl.models.dense.weights import Projection
from verl.models.products import Products

log = logging.getLogger(__name__)

Product = Callable[
    [torch.Tensor], torch.Tensor
]  # x [tokens, inputs] -> x weight^T + bias [tokens, outputs], in x's dtype

_TYPICAL_ROWS = 64
_CHECKED_ROWS = (1, 2, 65)


def product(projection: Projection, *, prepack: bool) -> Product:
    """Multiplication by a projection's weights. With `prepack` by a copy of them, where that is faster: float32 weights, and
    bfloat16 ones on a CPU without instructions for them, which are widened (see verl.models.products)."""
    weight, bias = projection.weight.detach(), projection.bias
    in_place = Products(weight.dtype, weight.device)
    if prepack and weight.device.type == "cpu" and (weight.dtype == torch.float32 or in_place.widens):
        bias = None if bias is None else bias.float()
        if _can_prepack(*weight.shape):
            return _Prepacked(weight, bias)
        if in_place.widens:
            return _Widened(weight, bias)
    return partial(in_place.linear, weight=weight, bias=bias)


def num_copied_bytes(products: list[Product]) -> int:
    """Memory that copies of weights take."""
    return sum(p.num_bytes for p in products if isinstance(p, _Widened | _Prepacked))


class _Widened:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        self._weight, self._bias = weight.float(), bias
        self.num_bytes = 4 * weight.numel()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x.float(), self._weight, self._bias).to(x.dtype)


class _Prepacked:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        self._packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.float(), _TYPICAL_ROWS)
        self._bias = bias
        self._shape = torch.empty(1).expand(weight.shape)  # the operator asks the plain weight for its shape only
        self.num_bytes = 4 * weight.numel()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # the last argument must equal the number of rows, or the operator multiplies by the plain weight
        y = torch.ops.mkl._mkl_linear(x.float(), self._packed, self._shape, self._bias, len(x))
        return y if y.dtype == x.dtype else y.to(x.dtype)


@functools.cache
def _can_prepack(outputs: int, inputs: int) -> bool:
    """Whether this build of torch prepacks, and one packed copy of such a weight serves any number of rows (which the
    library does but does not promise)."""
    if not (torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")):
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator)
    packed = _Prepacked(weight, None)
    for rows in _CHECKED_ROWS:
        x = torch.randn(rows, inputs, generator=generator)
        if not torch.allclose(packed(x), x @ weight.t(), atol=1e-4 * inputs**0.5, rtol=1e-4):
            log.warning("Weights [%d, %d] are not prepacked: the matrix library gives wrong products.", outputs, inputs)
            return False
    return True
