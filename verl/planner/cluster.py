"""Clusters: devices, and the links within a node and between nodes; the time of collectives over groups of their devices.

Cluster.of("h100_sxm", num_devices=64)
cluster.collective("all_reduce", num_bytes, DeviceGroup(size=16, per_node=8))
measure_cpu(memory=16e9)        this machine's processor, by a micro-benchmark of float32 kernels of about ten seconds
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from verl.config.keys import read_yaml
from verl.errors import ConfigError, nearest
from verl.planner.kernels import (
    BF16,
    CollectiveFit,
    DecodeFit,
    Device,
    ExpertsFit,
    KernelFits,
    MatmulFit,
    PrefillFit,
    collective_time,
    wire_bytes,
)

_FOLDER = Path(__file__).parent
_NETWORK_LATENCY_S = 20e-6  # of a message between nodes, as in the system files of Calculon (Isaev et al., SC 2023)
_NETWORK_SHARE = 0.8  # of the network's bandwidth that a collective reaches
RESERVED_BYTES = 2_500_000_000  # of a GPU: the context, NCCL's buffers and what an allocator cannot use


class DeviceGroup(NamedTuple):
    """`size` devices; domains of fast links hold `per_node` of them each."""

    size: int
    per_node: int

    @classmethod
    def of(cls, size: int, stride: int, domain: int) -> DeviceGroup:
        """Every `stride`-th device, `size` of them; `domain` neighbours share fast links."""
        return cls(size, max(1, min(size, domain // stride)))


@dataclass(frozen=True)
class Cluster:
    """`num_devices` devices. Bandwidths are in bytes/s per device and direction. `link_scale` is the bandwidth of the fast
    links, relative to the measured links."""

    device: Device
    num_devices: int
    gpus_per_node: int
    domain: int
    inter_bytes_s: float
    host_bytes_s: float
    link_scale: float = 1.0

    @classmethod
    def of(
        cls,
        gpu: str,
        num_devices: int,
        *,
        gpus_per_node: int | None = None,
        hbm_gb: float | None = None,
        inter_gbps: float | None = None,
    ) -> Cluster:
        """A cluster of a known device. `inter_gbps`: gigabits per second of a node's network, for all its devices."""
        facts = cluster_facts(gpu)
        per_node = gpus_per_node or min(int(facts["gpus_per_node"]), num_devices)
        if num_devices > per_node and num_devices % per_node:
            raise ConfigError(
                f"{num_devices} devices do not fill nodes of {per_node}; choose a multiple, or set plan.cluster.gpus_per_node."
            )
        device = known_device(gpu)
        if hbm_gb is not None:
            device = replace(device, memory=hbm_gb * 1e9)
        inter = facts["inter_gb_per_s"] * 1e9 if inter_gbps is None else inter_gbps * 1e9 / 8 / per_node
        domain = max(int(facts["domain"]), 1) if per_node == facts["gpus_per_node"] else per_node
        return cls(
            device, num_devices, per_node, domain, inter, facts["host_gb_per_s"] * 1e9, facts.get("link_scale", 1.0)
        )

    @property
    def memory(self) -> float:
        """Bytes of a device that a run can use."""
        return self.device.memory - RESERVED_BYTES

    def group(self, size: int, stride: int = 1) -> DeviceGroup:
        return DeviceGroup.of(size, stride, self.domain)

    def collective(self, operation: str, num_bytes: float, group: DeviceGroup) -> float:
        """Seconds of a collective on a tensor of `num_bytes` in all (of an all-to-all: per rank)."""
        if group.size <= 1 or num_bytes <= 0:
            return 0.0
        fit = self.device.kernels.collectives[operation]
        if group.size <= group.per_node:
            return float(collective_time(fit, operation, num_bytes, group.size, self.link_scale))
        return self._across(fit, operation, num_bytes, group)

    def _across(self, fit: CollectiveFit, operation: str, num_bytes: float, group: DeviceGroup) -> float:
        """Over several domains: rings cross each boundary once for each network card; an all-to-all sends by own cards."""
        fast = fit.gb_per_s * 1e9 * self.link_scale
        network = self.inter_bytes_s * _NETWORK_SHARE
        num_domains = -(-group.size // group.per_node)
        latency = fit.latency_us * 1e-6 + 2 * _NETWORK_LATENCY_S * (num_domains - 1).bit_length()
        if operation == "alltoall":
            outside = num_bytes * (group.size - group.per_node) / group.size
            return float(latency + max(outside / network, wire_bytes(operation, num_bytes, group.size) / fast))
        return float(latency + wire_bytes(operation, num_bytes, group.size) / min(fast, network * group.per_node))

    def send(self, num_bytes: float, *, across: bool) -> float:
        """Seconds of a message between neighbours of a pipeline."""
        fast = self.device.kernels.collectives["all_gather"].gb_per_s * 1e9 * self.link_scale
        return _NETWORK_LATENCY_S + num_bytes / (self.inter_bytes_s * _NETWORK_SHARE if across else fast)

    def to_host(self, num_bytes: float) -> float:
        """Seconds of a copy between a device and the host's memory."""
        return num_bytes / self.host_bytes_s

    def in_float32(self) -> Cluster:
        """The cluster of a run that computes in float32: without tensor cores, at the data sheet's rate."""
        peak = cluster_facts(self.device.name)["float32_tflops"] * 1e12
        return replace(self, device=replace(self.device, peak=peak, width=4))

    def with_devices(self, num_devices: int) -> Cluster:
        return replace(self, num_devices=num_devices)

    def __hash__(self) -> int:
        return hash(
            (self.device, self.num_devices, self.gpus_per_node, self.domain, self.inter_bytes_s, self.link_scale)
        )


@cache
def _rows(file: str) -> dict[str, dict[str, object]]:
    return cast("dict[str, dict[str, object]]", read_yaml(_FOLDER / file))


def cluster_facts(gpu: str) -> dict[str, Any]:
    """The row of clusters.yaml. Raises ConfigError for an unknown device."""
    rows = _rows("clusters.yaml")
    if gpu not in rows:
        names = f"Known are: {', '.join(rows)}, and cpu, this machine's processor."
        raise ConfigError(f"plan.cluster.gpu={gpu} is no known device{nearest(gpu, rows) or '.'} {names}")
    return rows[gpu]


@cache
def known_device(gpu: str) -> Device:
    """A device with its fitted constants. Raises ConfigError for an unknown one."""
    facts = cluster_facts(gpu)
    return device_from({**_rows("devices.yaml")[facts.get("like", gpu)], **facts}, gpu)


def device_from(row: Mapping[str, Any], name: str) -> Device:
    fits = row["kernels"]
    collectives = {operation: CollectiveFit(**fit) for operation, fit in fits["collectives"].items()}
    kernels = KernelFits(
        MatmulFit(**fits["matmul"]),
        PrefillFit(**fits["prefill"]),
        DecodeFit(**fits["decode"]),
        ExpertsFit(**fits["experts"]),
        collectives,
        **{key: fits[key] for key in ("elementwise", "launch_us", "step_host_s") if key in fits},
    )
    peak, bandwidth, size = (float(row[key]) for key in ("peak", "bandwidth", "memory"))
    return Device(name, peak, bandwidth, size, int(row["num_processors"]), kernels, int(row.get("width", BF16)))


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
    """Seconds of the fastest call after a warm-up. With one thread only the time on a core counts: it is shared."""
    import torch

    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    run()
    times: list[float] = []
    while sum(times) < _LONG_S or len(times) < 5:
        began = clock()
        run()
        times.append(clock() - began)
    return min(times)  # other processes can only add to it
