"""Operating system, CPU, memory, disk and limits, without torch; in a container its own limits."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from verl.parallel.memory import CGROUP, available_memory, content_of, memory_limit, system_memory

# instruction sets that matter for training speed; "bf16" and "i8mm" are ARM's names
_FLAGS = ("avx2", "f16c", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "sve", "bf16", "i8mm")
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE", "LOG_LEVEL", "MKL_NUM_THREADS", "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY", "PYTHONPATH", "PYTORCH_CUDA_ALLOC_CONF", "VERL_CPU_BF16", "WANDB_MODE",
)  # fmt: skip
_LIMITS = ("RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_AS", "RLIMIT_MEMLOCK", "RLIMIT_STACK")


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


def output_of(*command: str, timeout_s: float = 10.0) -> str:
    """The output of a program; "" if it is missing, fails or runs into the timeout."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _file_system(path: str) -> dict[str, object]:
    """Kind of the file system, reasons why it cannot hold checkpoints, and its limitations."""
    try:
        from verl.checkpoint.filesystem import examine_folder
    except ImportError:  # of a package that is not installed, which has its own finding
        return {"kind": "", "refusals": [], "notices": []}
    file_system = examine_folder(Path(path))
    return {"kind": file_system.kind, "refusals": file_system.refusals, "notices": file_system.notices}


def _disk(path: str, part: str) -> int | None:
    try:
        return int(getattr(shutil.disk_usage(path), part))
    except OSError:
        return None
