"""The constants of this machine's processor, by a micro-benchmark of about ten seconds: the device `cpu` of the planner.

    cluster = measure_cpu(memory=16e9)

Kernels in float32: the rate of matmuls at a short and at a long inner size, the memory's rate at a matrix that no cache holds,
attention, and operations on elements. The engine's overhead by layer and by step is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from verl.planner.cluster import Cluster
from verl.planner.kernels import DecodeFit, Device, ExpertsFit, KernelFits, MatmulFit, PrefillFit

_LONG_S = 0.3  # of a measurement
_WIDTH = 4  # float32, as runs on a processor compute
_ROWS, _SHORT, _LONG = 2048, 128, 1024  # of the matmuls
_TILE, _BLOCK = 8, 32  # rows that a matmul computes at once; queries of attention


def measure_cpu(memory: float, threads: int | None = None) -> Cluster:
    """This processor as a cluster of one device with `memory` bytes, computing with `threads` threads (None: as torch does)."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        return _measure(torch, memory)
    finally:
        torch.set_num_threads(before)


def _measure(torch: Any, memory: float) -> Cluster:
    # seconds of a matmul ascend with k + prologue: the prologue packs operands and stores the result
    short, long = (_matmul_seconds(torch, k) for k in (_SHORT, _LONG))
    slope = (long - short) / (_LONG - _SHORT)
    prologue = max(0.0, short / slope - _SHORT)
    peak = 2 * _ROWS * 768 / slope
    # a matrix that no cache holds, times one row: the time of reading it
    matrix, row = torch.randn(4096, 4096), torch.randn(4096, 1)
    bandwidth = matrix.numel() * _WIDTH / _seconds(lambda: matrix @ row)
    few, small = torch.randn(8, 64), torch.randn(64, 64)
    latency_us = _seconds(lambda: few @ small) * 1e6
    vector, out = torch.randn(1 << 22), torch.empty(1 << 22)
    moved = 2 * vector.numel() * _WIDTH / _seconds(lambda: torch.add(vector, 1.0, out=out))
    kernels = KernelFits(
        MatmulFit(latency_us, 1.0, 1.0, 0.0, prologue, 1.0, 6.0, _TILE),
        PrefillFit(latency_us, _attention_flops(torch) / peak, 1.0, 0.0, 0.0, 1.0, block=_BLOCK),
        DecodeFit(latency_us, 1.0, 0.0),
        ExpertsFit(latency_us, 1.0, 1.0, 1.0, 6.0),
        {},
        elementwise=moved / bandwidth,
        launch_us=0.0,
        step_host_s=0.0,
    )
    return Cluster(Device("cpu", peak, bandwidth, memory, 1, kernels, _WIDTH), 1, 1, 1, 1e9, bandwidth)


def _matmul_seconds(torch: Any, inner: int) -> float:
    a, b = torch.randn(_ROWS, inner), torch.randn(inner, 768)
    return _seconds(lambda: a @ b)


def _attention_flops(torch: Any) -> float:
    """Operations per second of causal attention, counted as in `prefill_time`."""
    length, heads, dim = 128, 4, 64
    q = torch.randn(8, heads, length, dim)
    seconds = _seconds(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True))
    return 2 * 8 * heads * dim * length * (length + _BLOCK) / seconds


def _seconds(run: Callable[[], object]) -> float:
    """Seconds of the fastest call, after a warm-up call; the calls take `_LONG_S` together. With one thread only the time on
    a core counts, since a call may wait for a core that another process uses."""
    import torch

    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    run()
    times: list[float] = []
    while sum(times) < _LONG_S or len(times) < 5:
        began = clock()
        run()
        times.append(clock() - began)
    return min(times)  # other processes can only add to it
