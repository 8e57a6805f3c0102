"""Matmuls of the dense forward: by the weights in place, or by a copy arranged for the matrix library.

A decode step multiplies few rows by every weight of the model, and the library spends a fifth of that on rearranging
weights as it goes (at 8 rows nearly half). MKL takes weights that were arranged once; that costs a copy of them, and as
long as two decode steps.

Libraries choose a kernel by the number of rows, and some kernels add up a row's terms in another order, or by the row's
place among the others. So a batch-invariant matmul is computed in tiles: numbers of rows for which random weights of the
same shape gave equal bits, at every place in every tile. Rows that fill no tile are padded.
"""

from __future__ import annotations

import bisect
import functools
import logging
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from verl.models.cpu.weights import Projection
from verl.models.matmul import Matmul

log = logging.getLogger(__name__)

Product = Callable[
    [torch.Tensor], torch.Tensor
]  # x [tokens, inputs] -> x weight^T + bias [tokens, outputs], in x's dtype

_TYPICAL_ROWS = 64
_CHECKED_ROWS = (1, 2, 65)
_TILES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 128, 192, 256)
_READING = 16  # rows whose arithmetic takes as long as reading the weights; decides between sets of tiles only


def product(projection: Projection, *, prepack: bool, invariant: bool = False) -> Product:
    """Multiplication by a projection's weights. With `prepack` by a copy of them, where that is faster: float32 weights, and
    bfloat16 ones on a CPU without instructions for them, which are widened (see verl.models.matmul). With `invariant` in
    tiles, for weights of which there is a set of tiles."""
    weight, bias = projection.weight.detach(), projection.bias
    multiply = _product(weight, bias, prepack)
    return Tiled(multiply, tiles_of(weight, bias is not None, prepack)) if invariant else multiply


def _product(weight: torch.Tensor, bias: torch.Tensor | None, prepack: bool) -> Product:
    in_place = Matmul(weight.dtype, weight.device, compiles=False)
    if prepack and weight.device.type == "cpu" and (weight.dtype == torch.float32 or in_place.widens):
        bias = None if bias is None else bias.float()
        if _can_prepack(*weight.shape):
            return _Prepacked(weight, bias)
        if in_place.widens:
            return _Widened(weight, bias)
    return partial(in_place.linear, weight=weight, bias=bias)


def num_copied_bytes(products: list[Product]) -> int:
    """Memory that copies of weights take."""
    inner = [p.multiply if isinstance(p, Tiled) else p for p in products]
    return sum(p.num_bytes for p in inner if isinstance(p, _Widened | _Prepacked))


class Tiled:
    """`multiply`, called with as many rows as one of `tiles` (ascending) has, whatever the number of rows is."""

    is_batch_invariant = True

    def __init__(self, multiply: Product, tiles: tuple[int, ...]):
        self.multiply, self.tiles = multiply, tiles

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) <= self.tiles[-1]:
            return self._tile(x)
        return torch.cat([self._tile(part) for part in x.split(self.tiles[-1])])

    def _tile(self, x: torch.Tensor) -> torch.Tensor:
        rows = padded_rows(self.tiles, len(x))
        if rows > len(x):
            return self.multiply(F.pad(x, (0, 0, 0, rows - len(x))))[: len(x)]
        # a kernel may treat rows that begin off a cache line otherwise
        return self.multiply(x if x.data_ptr() % 64 == 0 else x.clone())


def padded_rows(tiles: tuple[int, ...], rows: int) -> int:
    """The least tile that holds `rows`."""
    return tiles[bisect.bisect_left(tiles, rows)]


def padding_cost(tiles: tuple[int, ...]) -> float:
    """Estimated ratio of the time of matmuls in tiles to their time without padding, averaged over 1 to 64 rows."""
    rows = [r for r in range(1, 65) if r <= tiles[-1]]
    return sum((_READING + padded_rows(tiles, r)) / (_READING + r) for r in rows) / len(rows)


def tiles_of(weight: torch.Tensor, biased: bool, prepack: bool) -> tuple[int, ...]:
    """The cheapest set of tiles that give equal bits for weights like these; found once per process, shape and dtype."""
    outputs, inputs = weight.shape
    widens = Matmul(weight.dtype, weight.device).widens
    return _tiles(outputs, inputs, weight.dtype, biased, prepack, widens, torch.get_num_threads())


@functools.cache
def _tiles(
    outputs: int, inputs: int, dtype: torch.dtype, biased: bool, prepack: bool, widens: bool, threads: int
) -> tuple[int, ...]:
    """One row stands at every place of every tile. Tiles whose rows all give equal results are grouped by result.

    The terms of every sum cancel, so that the result is only the rounding of the partial sums. After sums that do not
    cancel, rounding to bfloat16 would hide nearly every difference in the order of adding.
    """
    generator = torch.Generator().manual_seed(0)
    half = inputs // 2
    order = torch.randperm(half, generator=generator)
    few = torch.randn(min(outputs * half, 1 << 20) + 1, generator=generator)  # repeated: more would take longer to make
    positive = few.repeat(-(-outputs * half // len(few)))[: outputs * half].view(outputs, half)
    weight = F.pad(torch.cat([positive, positive[:, order]], 1), (0, inputs % 2)).to(dtype)
    row = torch.randn(half, generator=generator)
    rows = F.pad(torch.cat([row, -row[order]]), (0, inputs % 2)).to(dtype).repeat(_TILES[-1], 1)
    bias = (torch.randn(outputs, generator=generator) * 1e-6).to(dtype) if biased else None
    multiply = _product(weight, bias, prepack)
    groups: list[tuple[torch.Tensor, list[int]]] = []
    for tile in _TILES:
        y = multiply(rows[:tile])
        if not torch.equal(y, y[:1].expand_as(y)):
            continue
        for row, tiles in groups:
            if torch.equal(row, y[0]):
                tiles.append(tile)
                break
        else:
            groups.append((y[0].clone(), [tile]))
    # a single row is always a tile; among sets of equal cost the longest comes first
    return min((tuple(tiles) for _, tiles in groups), key=lambda t: (_slowness(t), -len(t)))


def _slowness(tiles: tuple[int, ...]) -> float:
    """Estimated time of 1 to 256 rows: small tiles read the weights often, large tiles compute padding."""
    largest = tiles[-1]
    return sum(
        r // largest * (_READING + largest) + (_READING + padded_rows(tiles, r % largest) if r % largest else 0)
        for r in range(1, _TILES[-1] + 1)
    )


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
        y: torch.Tensor = torch.ops.mkl._mkl_linear(x.float(), self._packed, self._shape, self._bias, len(x))
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
            log.warning("Weights [%d, %d] are not prepacked: the matrix library multiplies wrongly.", outputs, inputs)
            return False
    return True
