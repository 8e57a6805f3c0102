"""The compiled kernels of a training step (kernels.c) on x86 processors, loaded with ctypes: in float32, and in bfloat16 on
processors with matmuls of pairs, and there the forward has the sampler's arithmetic (bf16_kernels.h).

Sums have one order: results do not depend on the number of threads. Without the library torch computes the same, rounded
otherwise.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int64, c_void_p
from pathlib import Path

import torch

from verl.parallel.compiled import choose_kernels, open_library
from verl.parallel.device import native_bf16

# operations on rows
RMS_NORM, RMS_NORM_BACKWARD, SWIGLU, SWIGLU_BACKWARD, ROTATE, LOG_SUM_EXP, LOGIT_GRADIENT, INVERSE_RMS = range(8)
_REVISION = 3  # of the structures, see kernels.h
_CPU = torch.device("cpu")
_ROWS = 32  # of kernels.h
_SHARE = 1 << 15  # elements that are worth waking a thread for
_DEPTH = 8192  # of a product that is rounded at the end of its sums
_scratch = threading.local()  # kept, since the pages of a new buffer would take 3% of a product


class Heads(Structure):
    _fields_ = (("data", c_void_p), ("token", c_int64), ("head", c_int64))


class AttentionCall(Structure):
    _fields_ = (
        [(name, c_int64) for name in ("num_heads", "num_kv_heads", "head_dim", "tokens", "longest", "packed_rows")]
        + [(name, c_int64) for name in ("num_ranges", "num_segments", "num_groups", "threads", "bf16")]
        + [("scale", c_float)]
        + [(name, c_void_p) for name in ("ranges", "segments", "groups")]
        + [(name, Heads) for name in ("q", "k", "v", "out", "d_out", "dq", "dk", "dv")]
        + [(name, c_void_p) for name in ("lse", "work")]
    )


class RowOperation(Structure):
    _fields_ = (
        [(name, c_int64) for name in ("count", "columns", "heads", "stride", "threads")]
        + [(name, c_void_p) for name in ("x", "out", "sums", "d_y", "weight", "scale")]
        + [("eps", c_float)]
    )


class Product(Structure):
    _fields_ = (
        [(name, c_int64) for name in ("rows", "columns", "depth", "a_row", "a_step", "b_column", "b_step")]
        + [(name, c_int64) for name in ("block", "add", "halves", "threads")]
        + [(name, c_void_p) for name in ("a", "b", "out", "work")]
    )


def usable(*tensors: torch.Tensor) -> bool:
    """Whether compiled kernels compute with `tensors`, all float32 or, to the sampler's bits, all bfloat16. Raises ConfigError
    for a VERL_CPU_ISA that cannot be had."""
    dtype = tensors[0].dtype
    return all(x.device.type == "cpu" and x.dtype == dtype for x in tensors) and _chosen(dtype) is not None


def num_threads(elements: int) -> int:
    """Threads for work on so many elements."""
    return min(torch.get_num_threads(), 1 + elements // _SHARE)


def run_attention(call: AttentionCall, backward: bool) -> None:
    """Attention forward or backward, in memory that is allocated here."""
    library = _library()
    assert library is not None
    work = torch.empty(library.attention_workspace(call, backward) + 16)
    call.work = work.data_ptr() + -work.data_ptr() % 64
    library.attention_run(_chosen(torch.bfloat16 if call.bf16 else torch.float32), call, backward)


def multiply(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """a [rows, depth] b [depth, columns] + bias, in bfloat16, rounded once. Pairs are added one after the other, in blocks of
    512 values, of 1024 for depths above 1024, that begin at zero: as oneDNN does on AMD's processors."""
    if bias is None:
        return add_product(torch.empty(len(a), b.shape[1], dtype=torch.bfloat16), a, b, overwrite=True)
    return add_product(bias.float().repeat(len(a), 1), a, b, overwrite=False).to(torch.bfloat16)


def add_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, overwrite: bool) -> torch.Tensor:
    """out += a b for bfloat16 a [rows, depth] and b [depth, columns], or = with `overwrite`. `out` is returned, and is
    contiguous, and float32 unless overwritten."""
    library = _library()
    assert library is not None
    assert overwrite or out.dtype == torch.float32
    (rows, depth), columns = a.shape, b.shape[1]
    if depth > _DEPTH and out.dtype == torch.bfloat16:
        return out.copy_(add_product(torch.empty(out.shape), a, b, overwrite=True))
    if not a.numel() or not b.numel():
        return out.zero_() if overwrite else out
    a, b = (x if 1 in x.stride() else x.contiguous() for x in (a, b))
    shapes, block = (rows, columns, depth, *a.stride(), *reversed(b.stride())), 512 if depth <= 1024 else 1024
    options = (block, not overwrite, out.dtype == torch.bfloat16, num_threads(rows * columns))
    call = Product(*shapes, *options, *(x.data_ptr() for x in (a, b, out)))
    size = library.product_workspace(call) + 16
    if getattr(_scratch, "floats", None) is None or len(_scratch.floats) < size:
        _scratch.floats = torch.empty(size)
    call.work = _scratch.floats.data_ptr() + -_scratch.floats.data_ptr() % 64
    library.product_run(_chosen(torch.bfloat16), call)
    return out


def run_rows(
    operation: int,
    x: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    columns: int,
    d_y: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    eps: float = 0.0,
    sums: bool = False,
) -> torch.Tensor | None:
    """An operation of pointwise_kernels.h, or INVERSE_RMS, on the rows of `x`; with `sums` the sum over its rows [columns]. All
    are contiguous, but heads of `x` [rows, heads, columns] are only adjacent."""
    assert x.dim() == 3 or x.is_contiguous()
    library = _library()
    assert library is not None
    count = len(x)
    parts = torch.empty(-(-count // _ROWS) + 1, columns) if sums else None
    rows = RowOperation(
        count, columns, x.shape[1], x.stride(0), num_threads(count * columns * (x.shape[1] if x.dim() == 3 else 1)),
        *(None if t is None else t.data_ptr() for t in (x, out, parts, d_y, weight, scale)), eps,
    )  # fmt: skip
    library.rows_run(_chosen(x.dtype), operation, rows)
    return None if parts is None else parts[-1]


def _chosen(dtype: torch.dtype) -> int | None:
    """Address of the kernels that compute in `dtype`."""
    if dtype not in (torch.float32, torch.bfloat16):
        return None
    kernels = choose_kernels(_kernels, _library() is not None)
    if kernels is None or dtype == torch.float32:
        return kernels
    return _bf16_kernels(os.environ.get("VERL_CPU_ISA") or None) if native_bf16(_CPU) else None


@functools.cache
def _bf16_kernels(name: str | None) -> int | None:
    library = _library()
    return None if library is None else library.bf16_kernels_for(None if name is None else name.encode())


@functools.cache
def _kernels(name: str | None) -> int | None:
    """Address of the kernels of an instruction set, by default of AVX2."""
    library = _library()
    return None if library is None else library.kernels_for(None if name is None else name.encode())


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The compiled library next to this file."""
    library = open_library(Path(__file__).parent.with_name("_kernels"), _REVISION)
    return None if library is None else _declare(library)


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    for find in (library.kernels_for, library.bf16_kernels_for):
        find.restype, find.argtypes = c_void_p, [c_char_p]
    if hasattr(library, "attention_run"):  # else compiled for a processor without kernels
        library.attention_workspace.restype = c_int64
        library.attention_workspace.argtypes = [POINTER(AttentionCall), c_int]
        library.attention_run.restype, library.attention_run.argtypes = None, [c_void_p, POINTER(AttentionCall), c_int]
        library.product_workspace.restype, library.product_workspace.argtypes = c_int64, [POINTER(Product)]
        library.product_run.restype, library.product_run.argtypes = None, [c_void_p, POINTER(Product)]
        library.rows_run.restype, library.rows_run.argtypes = None, [c_void_p, c_int, POINTER(RowOperation)]
    return library
