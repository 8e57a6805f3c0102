"""Best rates of this machine: matrix products at given shapes, and memory read and copied."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from flops import BACKWARD_AND_FORWARD, Decoder

MIN_SECONDS, MIN_RUNS = 0.3, 3
STREAM_BYTES = 1 << 29  # far beyond any cache


def seconds_of(function: Callable[[], object]) -> float:
    """Median seconds of a call over at least MIN_RUNS calls and MIN_SECONDS, after a call to warm up."""
    function()
    times: list[float] = []
    while len(times) < MIN_RUNS or sum(times) < MIN_SECONDS:
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


@torch.no_grad()
def square_rate(dtype: torch.dtype, size: int = 2048) -> float:
    """Operations per second of a square matrix product."""
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    out = torch.empty(size, size, dtype=dtype)
    return 2.0 * size**3 / seconds_of(lambda: torch.mm(a, b, out=out))


@dataclass(frozen=True)
class ProductSet:
    """A sequence of matrix products [rows, inputs] x [inputs, outputs], each with its own weights, so that weights come
    from memory as they do in a model."""

    rows: int
    matrices: tuple[tuple[int, int], ...]

    @property
    def flops(self) -> float:
        return sum(2.0 * self.rows * i * o for i, o in self.matrices)

    @torch.no_grad()
    def seconds(self, dtype: torch.dtype) -> float:
        """Median seconds of all of them in a row."""
        weights = [torch.randn(o, i).mul_(0.02).to(dtype) for i, o in self.matrices]
        inputs = {i: torch.randn(self.rows, i).to(dtype) for i, _ in self.matrices}

        def run() -> None:
            for weight in weights:
                F.linear(inputs[weight.shape[1]], weight)

        return seconds_of(run)


def model_products(model: Decoder, rows: int, *, joined: bool = False) -> ProductSet:
    """The products of one forward pass over `rows` tokens, the head's included."""
    layer = model.joined_matrices() if joined else model.layer_matrices()
    return ProductSet(rows, (*(layer * model.num_layers), model.head_matrix))


@torch.no_grad()
def training_rate(model: Decoder, rows: int, dtype: torch.dtype, num_layers: int = 4) -> float:
    """Operations per second of the products of forward and backward over `rows` tokens, in `num_layers` layers."""
    matrices = model.layer_matrices() * min(num_layers, model.num_layers)
    weights = [torch.randn(o, i).mul_(0.02).to(dtype) for i, o in matrices]
    narrow = {width: torch.randn(rows, width).to(dtype) for pair in matrices for width in pair}

    def run() -> None:
        for weight in weights:
            x, dy = narrow[weight.shape[1]], narrow[weight.shape[0]]
            F.linear(x, weight)
            torch.mm(dy, weight)
            torch.mm(dy.t(), x)

    return BACKWARD_AND_FORWARD * ProductSet(rows, tuple(matrices)).flops / seconds_of(run)


def decode_gemm_seconds(model: Decoder, batch: int, dtype: torch.dtype) -> float:
    """All matrix products of one decode step by themselves: as the layers have them, or with q, k, v and gate, up joined,
    whichever is faster here."""
    return min(model_products(model, batch, joined=joined).seconds(dtype) for joined in (False, True))


@torch.no_grad()
def read_rate() -> float:
    """Bytes per second read by a sum over a large tensor."""
    data = torch.ones(STREAM_BYTES // 4)
    return STREAM_BYTES / seconds_of(lambda: data.sum())


@torch.no_grad()
def copy_rate() -> float:
    """Bytes per second moved by a copy of a large tensor, read and written counted."""
    source = torch.ones(STREAM_BYTES // 8)
    target = torch.empty_like(source)
    return STREAM_BYTES / seconds_of(lambda: target.copy_(source))
