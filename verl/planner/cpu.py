"""The constants of this machine's processor, by a micro-benchmark of about ten seconds: the device `cpu` of the planner.

float32, as runs on a processor compute. The kernels of planner/kernels.py count two bytes an element, so the bandwidth is given
per two bytes. What a benchmark of single operations cannot know (the engine's own overhead) comes from another run:
benchmarks/planner.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from verl.planner.cluster import Cluster
from verl.planner.kernels import WIDTH, DecodeFit, Device, ExpertsFit, KernelFits, MatmulFit, PrefillFit

_LONG_S = 0.3  # of a measurement


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
    large = torch.randn(768, 768)
    peak = 2 * 768**3 / _seconds(lambda: large @ large)
    # a matrix that no cache holds, times one row: the time of reading it
    matrix, row = torch.randn(4096, 4096), torch.randn(4096, 1)
    bandwidth = matrix.numel() * WIDTH / _seconds(lambda: matrix @ row)
    few = torch.randn(8, 64)
    small = torch.randn(64, 64)
    latency_us = _seconds(lambda: few @ small) * 1e6
    vector, out = torch.randn(1 << 22), torch.empty(1 << 22)
    moved = 2 * vector.numel() * WIDTH / _seconds(lambda: torch.add(vector, 1.0, out=out))
    flops = _attention_flops(torch)
    kernels = KernelFits(
        MatmulFit(latency_us, 1.0, 1.0, 0.0, 0.0, 1.0, 6.0),
        PrefillFit(latency_us, flops / peak, 1.0, 0.0, 0.0, 1.0),
        DecodeFit(latency_us, 1.0, 0.0),
        ExpertsFit(latency_us, 1.0, 1.0, 1.0, 6.0),
        {},
        elementwise=moved / bandwidth,
        launch_us=latency_us,
    )
    return Cluster(Device("cpu", peak, bandwidth, memory, 1, kernels), 1, 1, 1, 1e9, bandwidth)


def _attention_flops(torch: Any) -> float:
    """Operations per second of causal attention, counted as in `prefill_time`."""
    length, heads, dim = 256, 4, 64
    q = torch.randn(2, heads, length, dim)
    seconds = _seconds(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True))
    return 2 * 2 * heads * dim * length * (length + 128) / seconds


def _seconds(run: Callable[[], Any]) -> float:
    """The median of calls that take `_LONG_S` together, after one that warms up."""
    run()
    times: list[float] = []
    while sum(times) < _LONG_S or len(times) < 5:
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]
