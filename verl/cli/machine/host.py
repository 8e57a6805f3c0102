"""Operating system, CPU, memory, disk, limits (of a container its own) and links between GPUs and machines, without torch."""

import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl.cli.report import Line, info, warn
from verl.parallel.memory import CGROUP, available_memory, content_of, memory_limit, system_memory

# instruction sets that matter for training speed; "bf16" and "i8mm" are ARM's names
_FLAGS = ("avx2", "f16c", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "sve", "bf16", "i8mm")
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE", "LOG_LEVEL", "MKL_NUM_THREADS", "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY", "PYTHONPATH", "PYTORCH_CUDA_ALLOC_CONF", "VERL_CPU_BF16", "WANDB_MODE",
)  # fmt: skip
_LIMITS = ("RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_AS", "RLIMIT_MEMLOCK", "RLIMIT_STACK")

Facts = dict[str, Any]  # of a machine or package, as JSON


def host() -> dict[str, object]:
    """Facts by name; sizes in bytes, None if unknown."""
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()).strip() or None,
        "cpu": cpu_model(),
        "cpu_flags": [flag for flag in _FLAGS if flag in cpu_flags()],
        "num_cores": os.cpu_count(),
        "num_usable_cores": usable_cores(),
        "memory_bytes": memory_limit(),
        "available_memory_bytes": available_memory(),
        "swap_bytes": system_memory("SwapTotal"),
        "shared_memory_bytes": _disk("/dev/shm", "total"),
        "free_disk_bytes": _disk(".", "free"),
        "free_temporary_bytes": _disk(tempfile.gettempdir(), "free"),
        "file_system": _file_system("."),
        "limits": limits(),
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def cpu_model() -> str:
    """The vendor's name of the processor."""
    for line in content_of(Path("/proc/cpuinfo")).splitlines():
        if line.lower().startswith(("model name", "hardware")):
            return line.partition(":")[2].strip()
    if platform.system() == "Darwin":
        return output_of("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor()
    return platform.processor() or platform.machine()


def cpu_flags() -> set[str]:
    """Instruction sets of the first core; empty without /proc."""
    for line in content_of(Path("/proc/cpuinfo")).splitlines():
        key, _, flags = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return set(flags.split())
    return set()


def usable_cores() -> float:
    """Cores that this process may use, by its affinity and the container's quota."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    quota, _, period = content_of(CGROUP / "cpu.max").strip().partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, int(quota) / int(period))
    return cores


def limits() -> dict[str, int | None]:
    """Soft limits of this process by name; None: unlimited."""
    try:
        import resource
    except ImportError:  # Windows
        return {}
    soft_limits: dict[str, int | None] = {}
    for name in _LIMITS:
        if hasattr(resource, name):
            soft = resource.getrlimit(getattr(resource, name))[0]
            soft_limits[name.removeprefix("RLIMIT_").lower()] = None if soft == resource.RLIM_INFINITY else soft
    return soft_limits


def output_of(*command: str) -> str:
    """The output of a program; "" if it is missing, fails or takes 10 s."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _file_system(path: str) -> dict[str, object]:
    """Kind of the file system, reasons why it cannot hold checkpoints, and its limitations."""
    try:
        from verl.checkpoint.filesystem import examine_folder
    except ImportError:  # a package that is not installed has its own finding
        return {"kind": "", "refusals": [], "notices": []}
    file_system = examine_folder(Path(path))
    return {"kind": file_system.kind, "refusals": file_system.refusals, "notices": file_system.notices}


def _disk(path: str, part: str) -> int | None:
    try:
        return int(getattr(shutil.disk_usage(path), part))
    except OSError:
        return None


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
    """Network interfaces that are up -> Mbit/s, 0 if the system does not say."""
    try:
        import psutil
    except ImportError:  # not installed: that has its own finding
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


def fabric() -> list[Facts]:
    """Active ports of InfiniBand and RoCE adapters: name, kind, and rate as the kernel writes it."""
    ports = []
    for port in sorted(_FABRIC.glob("*/ports/*")):
        if "ACTIVE" in content_of(port / "state"):
            kind = "RoCE" if "Ethernet" in content_of(port / "link_layer") else "InfiniBand"
            ports.append({"name": port.parts[-3], "kind": kind, "rate": content_of(port / "rate").strip()})
    return ports


def islands(gpu_links: list[list[str]]) -> list[list[int]]:
    """GPUs that reach each other over NVLink, directly or over other GPUs."""
    groups: list[list[int]] = []
    for gpu in range(len(gpu_links)):
        near = [part for part in groups if any(gpu_links[gpu][other].startswith("NV") for other in part)]
        groups = [part for part in groups if part not in near] + [sorted([gpu, *(g for part in near for g in part)])]
    return sorted(groups)


def described(network: Facts) -> str:
    """The links as a sentence."""
    pairs = {link for row in network["gpu_links"] for link in row if link != "X"}
    kinds = sorted(
        {re.sub(r"\d+$", "", link) for link in pairs}, key=lambda k: list(_LINKS).index(k) if k in _LINKS else 9
    )
    gpus = "GPUs connected by " + ", ".join(_LINKS.get(kind, kind) for kind in kinds) if kinds else "one GPU or none"
    ports = ", ".join(f"{p['name']} {p['kind']} {p['rate']}" for p in network["fabric"])
    sockets = ", ".join(f"{name} {speed} Mbit/s" if speed else name for name, speed in network["interfaces"].items())
    return f"{gpus}; between machines: {ports or f'sockets ({sockets})' if sockets or ports else 'nothing'}"


def advice(network: Facts) -> Iterator[Line]:
    """Settings that conflict with the machine's links, and sizes that fit the links. NCCL's own choices are not reviewed,
    since it looks at the same links."""
    parts, settings = islands(network["gpu_links"]), network["settings"]
    joined = [part for part in parts if len(part) > 1]
    if joined and settings.get("NCCL_P2P_DISABLE") == "1":
        yield warn("NCCL_P2P_DISABLE=1 keeps NCCL from NVLink, which connects GPUs here. Unset it")
    if network["fabric"] and settings.get("NCCL_IB_DISABLE") == "1":
        yield warn(
            f"NCCL_IB_DISABLE=1 sends what goes to other machines through sockets, but {network['fabric'][0]['name']} is an "
            f"active {network['fabric'][0]['kind']} port. Unset it for runs over several machines"
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
    speeds = network["interfaces"]
    if len(speeds) > 1 and not network["fabric"] and "NCCL_SOCKET_IFNAME" not in settings and max(speeds.values()):
        fastest = max(speeds, key=lambda name: speeds[name])
        yield info(
            f"several network interfaces: for a run over several machines set NCCL_SOCKET_IFNAME={fastest}, the fastest "
            f"({speeds[fastest]} Mbit/s)"
        )
