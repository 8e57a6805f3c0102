"""Time of single kernels on a device: matmuls, attention, experts, collectives. Closed forms with fitted constants.

All functions take numbers or numpy arrays, in elements of `device.width` bytes, and return seconds. With peak P (FLOP/s),
memory bandwidth B (bytes/s), a number of processors S, and a tile of 128 rows (64 for up to 64 rows) by 128 columns:

    matmul      latency + ((compute)^q + (memory)^q)^(1/q);  compute = waves * time of a tile with k + `prologue`;
                waves = w + `wave` (ceil(w) - w) for w = tiles / S >= 1, else w^`occupancy`;  memory = bytes / (`memory` B)
    prefill     latency + flops (causal half, blocks of `block` queries, `prologue` keys more) / (`compute` P d /
                (d + `head_dim`)) * waves / w + bytes / (`memory` B)
    decode      latency + the larger of KV bytes / (`memory` B) and waves * blocks of 128 keys in a part * `block` +
                rows * `row` + `combine` if sequences are read in parts: S / rows of them, so that all processors read
    experts     latency + ((bytes of the experts in use / (`memory` B))^q + (flops / (`compute` P))^q)^(1/q)
                + bytes of all rows / (`token` B);  an expert's rows fill tiles, of the rows of other ranks a share `skip` is
                computed too
    collective  latency + bytes / bandwidth + `ramp` sqrt(bytes);  bytes = bytes on the wire + `copy` of a rank's part; if
                small messages have a separate protocol, the faster of: bytes / `small`, `bulk` + bytes / bandwidth

The constants are in devices.yaml, with the error of each fit on kernels that it has not seen;
benchmarks/planner/fit_kernels.py of revision 2ec83716 fitted them.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

BF16 = 2  # bytes of an element
Number = Any  # a float, or an array of them


@dataclass(frozen=True)
class MatmulFit:
    latency_us: float
    compute: float  # share of the peak
    memory: float  # share of the bandwidth
    wave: float
    prologue: float  # columns of k
    occupancy: float
    blend: float
    tile: float = 128  # rows and columns


@dataclass(frozen=True)
class PrefillFit:
    latency_us: float
    compute: float
    memory: float
    wave: float
    head_dim: float
    occupancy: float
    prologue: float = 0.0  # keys
    block: float = 128  # queries of a tile: two tiles of 128 on Blackwell


@dataclass(frozen=True)
class DecodeFit:
    latency_us: float
    memory: float
    row_ns: float
    block_ns: float = 0.0  # of 128 keys of a row on one processor
    combine_us: float = 0.0
    wave: float = 0.0
    packs_queries: bool = True  # all queries of a KV head are one row; else each is


@dataclass(frozen=True)
class ExpertsFit:
    latency_us: float
    compute: float
    memory: float
    token: float  # share of the bandwidth for the rows of the tokens
    blend: float
    skip: float = 0.0  # share of the work for rows of experts that other ranks have
    small_tile: float = 1.0  # rows, up to a token for each expert
    tile: float = 1.0  # rows beyond


@dataclass(frozen=True)
class CollectiveFit:
    latency_us: float
    rank_us: float  # per rank beyond two
    gb_per_s: float  # on the wire, each direction
    ramp_ns: float  # per square root of a byte
    copy: float = 0.0  # share of a byte on the wire that copying a byte of the part of the rank takes
    small_gb_per_s: float = 0.0  # of the protocol for small messages; 0: there is one protocol
    bulk_us: float = 0.0  # latency of the protocol for large messages, in addition to `latency_us`


@dataclass(frozen=True)
class KernelFits:
    """The fitted constants of a device. `elementwise` is the share of the bandwidth that normalisations, activations and
    optimizers reach; `launch_us` the time between two kernels that the host launches one by one; `step_host_s` the host's
    scheduling and sampling of a decode step, in addition to its graph."""

    matmul: MatmulFit
    prefill: PrefillFit
    decode: DecodeFit
    experts: ExpertsFit
    collectives: dict[str, CollectiveFit] = field(hash=False)
    elementwise: float = 0.8
    launch_us: float = 5.0
    step_host_s: float = 1e-3


@dataclass(frozen=True)
class Device:
    """One accelerator. `peak` in FLOP/s of dense matmuls, `bandwidth` of its memory in bytes/s, `memory` in bytes, `width` in
    bytes of an element (2: bfloat16, 4: float32)."""

    name: str
    peak: float
    bandwidth: float
    memory: float
    num_processors: int
    kernels: KernelFits = field(hash=False)
    width: int = BF16

    def __hash__(self) -> int:
        return hash((self.name, self.peak, self.bandwidth, self.memory))


def matmul_time(device: Device, m: Number, n: Number, k: Number) -> Number:
    """A matmul [m, k] x [k, n]."""
    fit = device.kernels.matmul
    rows = np.where(np.asarray(m) <= fit.tile / 2, fit.tile / 2, fit.tile)
    waves = _waves(np.ceil(m / rows) * np.ceil(n / fit.tile) / device.num_processors, fit.wave, fit.occupancy)
    compute = waves * device.num_processors * 2 * rows * fit.tile * (k + fit.prologue) / (device.peak * fit.compute)
    memory = device.width * (m * k + k * n + m * n) / (device.bandwidth * fit.memory)
    return fit.latency_us * 1e-6 + _blend(compute, memory, fit.blend)


def prefill_time(device: Device, batch: Number, length: Number, heads: Number, kv_heads: Number, dim: Number) -> Number:
    """Causal attention of `batch` sequences of `length` tokens to themselves."""
    fit = device.kernels.prefill
    blocks = np.ceil(length / fit.block)
    w = batch * heads * blocks / device.num_processors
    flops = 2 * batch * heads * dim * blocks * fit.block * (length + fit.block + fit.prologue)
    compute = flops / (device.peak * fit.compute * dim / (dim + fit.head_dim)) * _waves(w, fit.wave, fit.occupancy) / w
    memory = device.width * 2 * batch * length * dim * (heads + kv_heads) / (device.bandwidth * fit.memory)
    return fit.latency_us * 1e-6 + compute + memory


def decode_time(
    device: Device, batch: Number, context: Number, kv_elements: Number, kv_heads: Number, heads: Number
) -> Number:
    """Attention of one new token of each of `batch` samples, with `heads` queries, to `context` cached ones of `kv_elements`
    elements each."""
    fit = device.kernels.decode
    read = device.width * batch * context * kv_elements / (device.bandwidth * fit.memory)
    rows, blocks = batch * kv_heads, np.maximum(np.ceil(context / 128), 1)
    parts = np.clip(np.ceil(device.num_processors / rows), 1, blocks)
    waves = _waves(rows * parts / device.num_processors, fit.wave, 0.0)
    computed = waves * np.ceil(blocks / parts) * fit.block_ns * 1e-9
    combined = np.where(parts > 1, fit.combine_us * 1e-6, 0.0)
    last = rows if fit.packs_queries else batch * heads
    return fit.latency_us * 1e-6 + combined + np.maximum(read, computed) + last * fit.row_ns * 1e-9


def experts_time(
    device: Device,
    tokens: Number,
    hidden: Number,
    inner: Number,
    top_k: Number,
    num: Number,
    ranks: Number = 1,
    *,
    even: bool = False,
) -> Number:
    """`tokens` tokens through `top_k` of `num` gated experts each. This device holds one of `ranks` parts and sorts
    the rows of all. `even`: the router uses as many experts as it can; else it chooses them independently."""
    fit = device.kernels.experts
    rows = tokens * top_k / ranks
    used = np.minimum(rows, num / ranks) if even else num / ranks * (1 - (1 - np.minimum(top_k / num, 1)) ** tokens)
    used = np.maximum(used, 1)
    tile = np.where(tokens <= num / ranks, fit.small_tile, fit.tile)
    tiles = np.ceil(np.maximum(rows / used / tile, 1e-9)) * tile * used if fit.tile > 1 else rows
    slots = tokens * np.minimum(1, top_k / ranks) * top_k if fit.skip else tokens * top_k  # of the tokens that arrive
    computed = tiles + fit.skip * (slots - rows)
    memory = device.width * 3 * hidden * inner * used / (device.bandwidth * fit.memory)
    compute = 2 * 3 * hidden * inner * computed / (device.peak * fit.compute)
    moved = device.width * slots * hidden / (device.bandwidth * fit.token)
    return fit.latency_us * 1e-6 + _blend(memory, compute, fit.blend) + moved


def wire_bytes(operation: str, num_bytes: Number, ranks: Number) -> Number:
    """Bytes that a rank sends in a ring; `num_bytes` is the full tensor (of an all-to-all: the tensor of a rank)."""
    return num_bytes * (ranks - 1) / ranks * (2 if operation == "all_reduce" else 1)


def collective_time(fit: CollectiveFit, operation: str, num_bytes: Number, ranks: Number, scale: float = 1.0) -> Number:
    """A collective among the devices of one node. Their links have `scale` times the bandwidth of the fit."""
    moved = (wire_bytes(operation, num_bytes, ranks) + fit.copy * num_bytes / ranks) / scale
    latency = (fit.latency_us + fit.rank_us * (ranks - 2)) * 1e-6
    sent = fit.bulk_us * 1e-6 + moved / (fit.gb_per_s * 1e9) + fit.ramp_ns * 1e-9 * np.sqrt(num_bytes / scale)
    if fit.small_gb_per_s:
        sent = np.minimum(sent, moved / (fit.small_gb_per_s * 1e9))
    return latency + sent


def elementwise_time(device: Device, num_bytes: Number) -> Number:
    """Operations that read and write `num_bytes` bytes altogether."""
    return num_bytes / (device.bandwidth * device.kernels.elementwise)


def _waves(w: Number, wave: float, occupancy: float) -> Number:
    return np.where(w >= 1, w + wave * (np.ceil(w) - w), np.maximum(w, 1e-9) ** occupancy)


def _blend(a: Number, b: Number, power: float) -> Number:
    longer = np.maximum(a, b)
    return longer * ((a / longer) ** power + (b / longer) ** power) ** (1 / power)
