"""The device and the dtype that a run computes with."""

import functools
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass

from verl.errors import ConfigError, nearest
from verl.parallel import memory
from verl.parallel.pinned import pinned_like

_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp64": torch.float64,
    "float64": torch.float64,
}
CPU_BF16 = "VERL_CPU_BF16"  # environment variable: "native" or "widened", for any CPU; for tests
_FAST_BF16_FLAGS = {"amx_bf16", "bf16"}  # the last is ARM's name in /proc/cpuinfo
# dense bfloat16 operations per second (float32 sums) that the vendors' data sheets state, by words of the device's name
PEAK_FLOPS = {
    "GB200": 2.5e15, "B200": 2.25e15, "MI300X": 1307e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12,
    "H800": 989e12, "H200 NVL": 835e12, "H200": 989e12, "H20": 148e12, "A100": 312e12, "A800": 312e12, "A40": 149.7e12,
    "A30": 165e12, "A10": 125e12, "L40S": 362.05e12, "L40": 181.05e12, "L20": 119.5e12, "L4": 121e12,
}  # fmt: skip


def resolve_device(name: str = "auto") -> torch.device:
    """The device of "auto" (CUDA if available, else the CPU), "cpu", "cuda" or "cuda:1".

    Raises ConfigError when the name is unknown or CUDA is asked for and cannot be used.
    """
    kind = device_kind(name)
    if kind == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        build = (
            "this PyTorch build has no CUDA" if torch.version.cuda is None else "PyTorch finds no usable CUDA device"
        )
        raise ConfigError(f"trainer.device={name} was asked for, but {build}. Use trainer.device=auto or cpu.")
    return torch.device(name)


def make_current(device: torch.device) -> None:
    """Let calls that name no device mean `device` from now on, in this thread: FSDP shards onto the GPU that is current,
    NCCL and vLLM's workers take it. Without it all ranks of a host would meet on GPU 0."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def give_back_cache(device: torch.device) -> None:
    """Free memory of `device` that the allocator of this process caches, for other allocators and processes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


_PEAKS: dict[int, int] = {}  # by GPU: the largest peak before the last reset, in bytes


def reset_peak_memory(device: torch.device | int) -> None:
    """Reset the peak of torch.cuda.max_memory_allocated; `most_memory_allocated` still counts the peak before."""
    _PEAKS[torch.cuda._utils._get_device_index(device, optional=True)] = most_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)


def most_memory_allocated(device: torch.device | int) -> int:
    """Peak bytes of this process's allocator on a GPU since its start, resets included."""
    index = torch.cuda._utils._get_device_index(device, optional=True)
    return max(_PEAKS.get(index, 0), torch.cuda.max_memory_allocated(device))


def start_peak(device: torch.device) -> int | None:
    """Memory of this process on `device` now, with the record of `peak_memory` started again; None if the system keeps no
    record that can be reset."""
    if device.type == "cuda":
        reset_peak_memory(device)
        return torch.cuda.memory_allocated(device)
    return memory.resident_bytes() if memory.reset_peak() else None


def peak_memory(device: torch.device) -> int:
    """The most memory of this process on `device` since `start_peak`."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else memory.peak_bytes()


def device_kind(name: str) -> str:
    """The kind of device `name`: auto, cpu or cuda. Raises ConfigError for an unknown name, and needs no GPU."""
    kind, _, index = name.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and not (index.isdigit() and kind != "auto")):
        hint = nearest(name, ["auto", "cpu", "cuda"])
        raise ConfigError(f"trainer.device={name!r} is not a device; use auto, cpu or cuda{hint}.")
    return kind


def visible_devices() -> tuple[str, ...]:
    """This process's GPUs, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return tuple(named.split(",")) if named else tuple(map(str, range(torch.cuda.device_count())))


def native_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 matrices in hardware, faster than float32 ones. The environment variable
    VERL_CPU_BF16 answers for CPUs. Raises ConfigError when it is neither "native" nor "widened".

    AVX512-BF16 counts only on AMD's processors. Without AMX (a hypervisor may hide it) Intel's processors multiply bfloat16
    pairs at 0.6 of their float32 rate (Sapphire Rapids)."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type != "cpu":
        return False
    forced = os.environ.get(CPU_BF16, "")
    if forced not in ("", "native", "widened"):
        raise ConfigError(f"The environment variable {CPU_BF16}={forced} is neither native nor widened; unset it.")
    if forced:
        return forced == "native"
    return bool(_cpu_flags() & _FAST_BF16_FLAGS) or {"avx512_bf16", "AuthenticAMD"} <= _cpu_flags()


def has_only_float16(device: torch.device) -> bool:
    """Whether the device multiplies matrices fast in float16 only: NVIDIA's Volta and Turing, such as V100 and T4."""
    return device.type == "cuda" and (7, 0) <= torch.cuda.get_device_capability(device) < (8, 0)


def fp8_obstacle(device: torch.device) -> str:
    """The reason why torch does not multiply rows in fp8 (e4m3) on the device; "" if it does."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"needs an NVIDIA GPU, and the model is on {'an AMD GPU' if torch.version.hip else device.type}"
    if (capability := torch.cuda.get_device_capability(device)) < (8, 9):
        return (
            f"needs a GPU with fp8 instructions (compute capability 8.9, as of L4, RTX 4090 and H100), and {device} has "
            f"{'.'.join(map(str, capability))}"
        )
    return ""


def peak_flops(device: torch.device) -> float | None:
    """Dense bfloat16 operations per second of a GPU at its peak; None for a CPU and a GPU that is not in PEAK_FLOPS."""
    return named_peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def named_peak_flops(device_name: str) -> float | None:
    """See peak_flops."""
    return next((peak for name, peak in PEAK_FLOPS.items() if re.search(rf"\b{name}\b", device_name)), None)


def prefers_onednn(device: torch.device) -> bool:
    """Whether oneDNN multiplies float32 matrices of the device faster than MKL, the library behind `torch.mm`: on AMD's
    processors with AVX-512, by a third (186 in place of 140 GFLOP/s on two cores that can reach 220). With only AVX2, MKL is
    faster (Zen 3, one core, shapes of SmolLM2: 81 to 91 GFLOP/s against 42 to 81)."""
    return device.type == "cpu" and {"avx512f", "AuthenticAMD"} <= _cpu_flags() and torch.backends.mkldnn.is_available()


@functools.cache
def _cpu_flags() -> set[str]:
    """Instruction sets of the first CPU and the name of its maker. Without /proc (macOS) an ARM CPU is taken to be an Apple
    one: no bfloat16 before M2."""
    info, flags = Path("/proc/cpuinfo"), set()
    if info.exists():
        for line in info.read_text().partition("\n\n")[0].splitlines():
            key, _, words = line.partition(":")
            if key.strip() in ("vendor_id", "flags", "Features"):
                flags |= set(words.split())
    elif platform.machine().lower() in ("amd64", "x86_64") and torch.cpu._is_avx512_bf16_supported():
        flags = {"avx512_bf16", *re.findall("AuthenticAMD", platform.processor())}
    return flags


def parse_dtype(name: str) -> torch.dtype:
    """The dtype called bf16, fp16, fp32, fp64 or by its full name; raises ConfigError for another name."""
    if name not in _DTYPES:
        raise ConfigError(
            f"dtype={name!r} is not a dtype that verl computes in; use auto, bfloat16, float16 or float32."
        )
    return _DTYPES[name]


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of forward and backward; "auto" is bfloat16 if the device computes it natively, else float32."""
    if name == "auto":
        return torch.bfloat16 if native_bf16(device) else torch.float32
    return parse_dtype(name)


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """`tensor` on `device`. From the host to CUDA through pinned memory: a copy from pageable memory would wait for all that
    the device has yet to do."""
    if tensor.device.type != "cpu" or torch.device(device).type != "cuda" or not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_match(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`tensor` on the device of `other`, as by `to_device`, and in its dtype."""
    return to_device(tensor, other.device).to(other.dtype)


def moved(tensor: torch.Tensor, device: torch.device | str, *, copy: bool = False) -> torch.Tensor:
    """`tensor` on `device`, without its graph; a sharded tensor moves this rank's part. Copies between a GPU and the host go
    through pinned memory, several times as fast. With `copy` the result is always a new tensor."""
    tensor = tensor.detach()
    if is_traceable_wrapper_subclass(tensor):  # such as a DTensor: it has a mesh and a part
        return transform_subclass(
            tensor, lambda _, part: moved(part, device, copy=copy) if isinstance(part, torch.Tensor) else part
        )
    if tensor.device.type == "cuda" and torch.device(device).type == "cpu":
        return pinned_like(tensor).copy_(tensor)
    result = to_device(tensor, device)
    return result.clone() if copy and result is tensor else result


def move_module(module: torch.nn.Module, device: torch.device | str) -> None:
    """As `module.to(device)`, by `moved`."""
    module._apply(lambda tensor: moved(tensor, device))


def write_at(target: torch.Tensor, dim: int, places: torch.Tensor, values: torch.Tensor) -> None:
    """`target.index_copy_` for `places` that are all different. Deterministic mode is off for the call: on a GPU it would sort
    the places, as if equal ones could occur."""
    with _deterministic_mode(False):
        target.index_copy_(dim, places, values)


@contextmanager
def strictly_deterministic() -> Iterator[None]:
    """Deterministic mode, if it is on, without warn_only: the backward of flash attention on CUDA sums in a fixed order only
    then."""
    with _deterministic_mode(True):
        yield


@contextmanager
def _deterministic_mode(deterministic: bool) -> Iterator[None]:
    """Deterministic mode on (without warn_only) or off inside the block; nothing changes if it was off."""
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch._C._set_deterministic_algorithms(deterministic, warn_only=False)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(True, warn_only=warns)
