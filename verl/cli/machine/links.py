"""Links between GPUs and between machines, as the driver and the kernel list them, and advice on communication settings."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl.cli.machine.host import output_of
from verl.cli.report import Line, info, warn
from verl.parallel.memory import content_of

# the links of `nvidia-smi topo -m`, from the fastest to the slowest
_LINKS = {
    "NV": "NVLink",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the PCIe root of a processor",
    "NODE": "PCIe roots of one processor",
    "SYS": "two processors",
}
_FABRIC = Path("/sys/class/infiniband")
_PREFIXES = ("NCCL_", "GLOO_", "CUDA_DEVICE_MAX_CONNECTIONS")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def links() -> dict[str, object]:
    """Facts by name; what cannot be read is empty, and nothing follows from it."""
    return {
        "gpu_links": parse_topology(output_of("nvidia-smi", "topo", "-m")),
        "fabric": fabric(),
        "interfaces": interfaces(),
        "settings": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)},
    }


def interfaces() -> dict[str, int]:
    """Network interfaces that are up -> Mbit/s, 0 where the system does not say."""
    try:
        import psutil
    except ImportError:  # not installed, which has its own finding
        return {}
    names = ("lo", "docker", "veth", "br-", "virbr")
    return {
        name: stats.speed for name, stats in psutil.net_if_stats().items() if stats.isup and not name.startswith(names)
    }


def parse_topology(text: str) -> list[list[str]]:
    """`found[i][j]` is the link of GPUs i and j in `nvidia-smi topo -m`: NV4, PIX, ..., "X" for itself; [] without GPUs."""
    lines = [_ESCAPES.sub("", line).split() for line in text.splitlines()]
    rows = [words[1:] for words in lines if len(words) > 1 and words[0].startswith("GPU") and "X" in words]
    return [row[: len(rows)] for row in rows if len(row) >= len(rows)]


def fabric() -> list[dict[str, Any]]:
    """Active ports of InfiniBand and RoCE adapters: name, kind, and rate as the kernel writes it."""
    ports = []
    for port in sorted(_FABRIC.glob("*/ports/*")):
        if "ACTIVE" in content_of(port / "state"):
            kind = "RoCE" if "Ethernet" in content_of(port / "link_layer") else "InfiniBand"
            ports.append({"name": port.parts[-3], "kind": kind, "rate": content_of(port / "rate").strip()})
    return ports


def islands(gpu_links: list[list[str]]) -> list[list[int]]:
    """GPUs that reach each other over NVLink, directly or over others."""
    groups: list[list[int]] = []
    for gpu in range(len(gpu_links)):
        near = [part for part in groups if any(gpu_links[gpu][other].startswith("NV") for other in part)]
        groups = [part for part in groups if part not in near] + [sorted([gpu, *(g for part in near for g in part)])]
    return sorted(groups)


def described(of_links: dict[str, Any]) -> str:
    """The links as a sentence."""
    pairs = {link for row in of_links["gpu_links"] for link in row if link != "X"}
    kinds = sorted(
        {re.sub(r"\d+$", "", link) for link in pairs}, key=lambda k: list(_LINKS).index(k) if k in _LINKS else 9
    )
    gpus = "GPUs connected by " + ", ".join(_LINKS.get(kind, kind) for kind in kinds) if kinds else "one GPU or none"
    ports = ", ".join(f"{p['name']} {p['kind']} {p['rate']}" for p in of_links["fabric"])
    sockets = ", ".join(f"{name} {speed} Mbit/s" if speed else name for name, speed in of_links["interfaces"].items())
    return f"{gpus}; between machines: {ports or f'sockets ({sockets})' if sockets or ports else 'nothing'}"


def advice(of_links: dict[str, Any]) -> Iterator[Line]:
    """Settings that conflict with the machine's links, and sizes that fit the links. NCCL's own choices are not reviewed,
    since it looks at the same links."""
    parts, settings = islands(of_links["gpu_links"]), of_links["settings"]
    joined = [part for part in parts if len(part) > 1]
    if joined and settings.get("NCCL_P2P_DISABLE") == "1":
        yield warn("NCCL_P2P_DISABLE=1 keeps NCCL from NVLink, which connects GPUs here. Unset it")
    if of_links["fabric"] and settings.get("NCCL_IB_DISABLE") == "1":
        yield warn(
            f"NCCL_IB_DISABLE=1 sends what goes to other machines through sockets, but {of_links['fabric'][0]['name']} is an "
            f"active {of_links['fabric'][0]['kind']} port. Unset it for runs over several machines"
        )
    if len(parts) > 1 and joined:
        yield info(
            f"NVLink connects GPUs {' and '.join(','.join(map(str, part)) for part in joined)} among themselves only: choose "
            f"tensor_parallel_size, ulysses_sequence_parallel_size and fsdp_size of at most {max(map(len, joined))}"
        )
    if len(parts) > 1 and not joined:
        yield info(
            "no NVLink between the GPUs: tensor and sequence parallelism exchange much in every layer. Prefer fsdp_size, and "
            "measure with verl.utils.benchmark_nccl()"
        )
    if settings.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        yield warn(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 orders kernels as Megatron's tensor parallelism wants; FSDP gathers parameters "
            "beside the computation, and needs more. Unset it for strategy=fsdp"
        )
    if "NCCL_PROTO" in settings:
        yield info(
            f"NCCL_PROTO={settings['NCCL_PROTO']} takes the place of NCCL's own choice by message size; compare without it by "
            "verl.utils.benchmark_nccl()"
        )
    speeds = of_links["interfaces"]
    if len(speeds) > 1 and not of_links["fabric"] and "NCCL_SOCKET_IFNAME" not in settings and max(speeds.values()):
        fastest = max(speeds, key=lambda name: speeds[name])
        yield info(
            f"several network interfaces: for a run over several machines set NCCL_SOCKET_IFNAME={fastest}, the fastest "
            f"({speeds[fastest]} Mbit/s)"
        )
