"""Rounding of float32 master weights to the bfloat16 weights that compute.

Rounding to nearest hides every update that is smaller than half the distance of two bfloat16 values: such a weight computes
with its old value for as long as the run lasts. Dithered rounding adds an offset u in [0, 2^16) to the bits and cuts off the
lower half:

    bits(weight) = (bits(master) + u) & 0xFFFF0000

The offset belongs to the element, and is sampled once. So a master on the bfloat16 grid never moves, and a weight changes
only if its master does. Over the elements, the expected visible change equals the masters' change. Stochastic rounding of
updates (Gupta et al. 2015, arXiv:1502.02551) has the same expectation, and samples again at every step.

The offset depends only on the parameter's name and the element's position in the full tensor: every sharding and every copy
computes the same weights. It is the exclusive or of two tiles of random offsets that are repeated over the flattened tensor.
Their lengths are different primes. So a pair of elements has independent offsets unless both lengths divide its distance
(2.7e9 elements), for any length of a row. A single tile would give rows of 2^k elements nearly equal sums of offsets.
"""

import ctypes
import functools
import hashlib
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from verl.models.ops.table import op
from verl.models.quantized import largest_of_matrices, nvfp4
from verl.parallel.compiled import open_library

TILE_LENGTHS = (65_537, 40_961)  # prime, and together small enough for a cache
_SEED = 0x7E71
_LARGEST = torch.finfo(torch.bfloat16).max
_CHUNK, _DEVICE_CHUNK = 1 << 18, 1 << 22  # elements at a time: what stays in a cache, and enough for a kernel


@dataclass(frozen=True)
class Region:
    """A block of a full tensor of `shape` that begins at the coordinates `first`."""

    shape: tuple[int, ...]
    first: tuple[int, ...]


@dataclass(frozen=True)
class Rounding:
    """The rounding of masters to compute weights: `dithered` or to `nearest`, and of some parameters to values of NVFP4."""

    kind: str = "dithered"
    four_bit: frozenset[str] = frozenset()  # names of whole parameters
    largest: Mapping[str, torch.Tensor] = field(default_factory=dict)  # see `measured`

    @torch.no_grad()
    def measured(self, masters: Iterable[tuple[str, torch.Tensor]]) -> "Rounding":
        """This rounding for four-bit parameters with these values. q, k and v of a layer share a scale, and so do gate and up:
        samplers multiply them as one matrix."""
        largest: dict[str, torch.Tensor] = {}
        for name, master in masters:
            if name in self.four_bit:
                values = largest_of_matrices(master)
                largest[_fused(name)] = torch.maximum(largest.get(_fused(name), values), values)
        return replace(self, largest=largest)

    @torch.no_grad()
    def write(self, target: torch.Tensor, name: str, master: torch.Tensor, region: Region | None = None) -> None:
        """Fill `target` with the rounded `master`, which is `region` of the parameter `name` (default: all of it). Only
        float32 to bfloat16 is dithered; other dtypes are cast."""
        if name in self.four_bit:
            target.copy_(nvfp4(master, self.largest.get(_fused(name))))
        elif self.kind == "nearest" or target.dtype != torch.bfloat16 or master.dtype != torch.float32:
            target.copy_(master)
        elif master.device != target.device or not target.is_contiguous():
            target.copy_(self.rounded(name, master, target.dtype, region))
        elif master.numel():
            region = region or Region(tuple(master.shape), (0,) * master.dim())
            if master.device.type == "cpu" and _compiled() is not None:
                _dither_compiled(target, name, master.contiguous(), region)
                torch.autograd.graph.increment_version(target)  # as a copy would; the kernel writes past torch
            else:
                dither(master.contiguous(), target, _phase(name), list(region.shape), list(region.first))

    def rounded(
        self, name: str, master: torch.Tensor, dtype: torch.dtype, region: Region | None = None
    ) -> torch.Tensor:
        """`master` in `dtype`, see `write`; `master` itself if it has that dtype and is not rounded."""
        if master.dtype == dtype and name not in self.four_bit:
            return master
        out = torch.empty(master.shape, dtype=dtype, device=master.device)
        self.write(out, name, master, region)
        return out


def _fused(name: str) -> str:
    """The name of the matrix that has this one."""
    return re.sub(r"\.(gate|up)_proj\.", ".gate_up_proj.", re.sub(r"\.[qkv]_proj\.", ".qkv_proj.", name))


def offsets(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The offsets of a full parameter, int32 in [0, 2^16)."""
    at, (a, b) = torch.arange(math.prod(shape)), tiles(torch.device("cpu"), 0)
    return (a[(at + _phase(name)) % len(a)] ^ b[(at + _phase(name)) % len(b)]).view(shape)


@op(triton="dither:launch_dither", writes=("target",))
def dither(master: torch.Tensor, target: torch.Tensor, phase: int, shape: list[int], first_at: list[int]) -> None:
    """Write `master` to `target` with the offsets of a parameter of shape `shape` with this `phase`. Both are the block of it
    that begins at the coordinates `first_at`."""
    max_positions = _CHUNK if master.device.type == "cpu" else _DEVICE_CHUNK
    repeated, region = tiles(master.device, max_positions), Region(tuple(shape), tuple(first_at))
    weights, wide = target.view(-1), master.view(-1)
    out = weights.view(torch.int16)
    scratch = torch.empty(min(max_positions, wide.numel()), dtype=torch.int32, device=master.device)
    for at, rows, columns, first, stride in chunks(tuple(master.shape), region, max_positions):
        block = slice(at, at + rows * columns)
        values, moved = wide[block], scratch[: rows * columns]
        u, other = (
            tile.as_strided((rows, columns), (stride, 1), (first + phase) % length)
            for tile, length in zip(repeated, TILE_LENGTHS, strict=True)
        )
        torch.bitwise_xor(u, other, out=moved.view(rows, columns))
        moved += values.view(torch.int32)
        moved >>= 16
        out[block].copy_(moved)
        if master.device.type != "cpu":
            _keep_extremes(weights[block], values)  # to ask first would wait for the device
        else:
            low, high = values.aminmax()  # NaN if there is one
            if not (-_LARGEST < low.item() and high.item() < _LARGEST):
                _keep_extremes(weights[block], values)


def _dither_compiled(target: torch.Tensor, name: str, master: torch.Tensor, region: Region) -> None:
    """As `dither`, on a CPU and in one pass over memory, on the threads that torch would use."""
    run, phase = _compiled(), _phase(name)
    assert run is not None
    short = [argument for tile in _short_tiles() for argument in (tile.data_ptr(), len(tile))]
    weights, wide = target.view(-1), master.view(-1)

    def write(chunk: tuple[int, int, int, int, int]) -> None:
        at, rows, columns, first, stride = chunk
        block = slice(at, at + rows * columns)
        to, start = weights[block], wide[block]
        if run(to.data_ptr(), start.data_ptr(), rows, columns, first + phase, stride, *short):
            _keep_extremes(to, start)

    threads = torch.get_num_threads()
    share = max(_CHUNK, -(-wide.numel() // threads))
    parts = list(chunks(tuple(master.shape), region, share))
    if threads == 1 or len(parts) == 1:
        for part in parts:
            write(part)
    else:
        list(_pool(threads).map(write, parts))


@functools.cache
def _compiled() -> Callable[..., int] | None:
    """The function of rounding.c; None if it was not compiled."""
    library = open_library(Path(__file__).with_name("_rounding"))
    if library is None:
        return None
    function = library.verl_dither
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [pointer, pointer, number, number, number, number, pointer, number, pointer, number]
    return function


@functools.cache
def _short_tiles() -> tuple[torch.Tensor, ...]:
    """The tiles in 16 bits."""
    return tuple(tile.to(torch.uint16) for tile in tiles(torch.device("cpu"), 0))


@functools.lru_cache(maxsize=2)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="rounding")


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork


def _keep_extremes(weights: torch.Tensor, master: torch.Tensor) -> None:
    """Keep infinities and NaN, and clamp a finite master at or beyond the largest bfloat16 to the largest bfloat16."""
    finite = master.clamp(-_LARGEST, _LARGEST)
    extreme = torch.where(master.isfinite(), finite, master).to(torch.bfloat16)
    weights.copy_(torch.where(master.abs() < _LARGEST, weights, extreme))


def chunks(shape: tuple[int, ...], region: Region, max_positions: int) -> Iterator[tuple[int, int, int, int, int]]:
    """(start in the flat local tensor, rows, columns, flat position of the first element in the full tensor, distance of two
    rows there) of chunks that cover a local tensor of `shape`. A chunk spans at most `max_positions` of the full tensor."""
    full, first = region.shape, region.first
    assert len(shape) == len(full) == len(first)
    assert all(f >= 0 and f + n <= size for f, n, size in zip(first, shape, full, strict=True)), (shape, region)
    strides = [math.prod(full[dim + 1 :]) for dim in range(len(full))]
    begin = sum(f * stride for f, stride in zip(first, strides, strict=True))
    cut = max((dim for dim in range(len(full)) if shape[dim] != full[dim]), default=0)  # behind it all is complete
    columns = math.prod(shape[cut:])
    stride = strides[cut - 1] if cut else columns
    rows = shape[cut - 1] if cut else 1
    rows_at_a_time = max(1, (max_positions - columns) // stride + 1) if columns <= max_positions else 1
    at = 0
    for outer in itertools.product(*(range(size) for size in shape[: max(0, cut - 1)])):
        origin = begin + sum(i * s for i, s in zip(outer, strides, strict=False))
        for row in range(0, rows, rows_at_a_time):
            num_rows = min(rows_at_a_time, rows - row)
            for column in range(0, columns, max_positions):
                width = min(max_positions, columns - column)
                yield at, num_rows, width, origin + row * stride + column, stride
                at += num_rows * width


@functools.lru_cache(maxsize=16)
def tiles(device: torch.device, spare: int) -> tuple[torch.Tensor, ...]:
    """The tiles, each continued by its repetitions for `spare` elements."""
    generator = torch.Generator().manual_seed(_SEED)
    once = (torch.randint(1 << 16, (length,), generator=generator, dtype=torch.int32) for length in TILE_LENGTHS)
    return tuple(tile.repeat(-(-spare // len(tile)) + 1)[: len(tile) + spare].to(device) for tile in once)


@functools.cache
def _phase(name: str) -> int:
    """The offset of a parameter in the tiles."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") % math.prod(TILE_LENGTHS)
