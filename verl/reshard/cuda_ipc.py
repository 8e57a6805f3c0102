"""GPU memory that another process opens by a handle, through the CUDA driver.

torch also shares tensors between processes, but counts readers per share. With several readers, or a reader that reads
twice or never, the count is wrong and the memory leaks. Blocks of its allocator cannot always be shared either (expandable
segments). Here the memory is allocated separately, and its owner knows when it is no longer read.
"""

import contextlib
import ctypes
import functools
from collections.abc import Callable

import torch

_LIBRARY = "libcuda.so.1"  # part of the driver, the same for all versions of CUDA
_HANDLE_BYTES = 64
_OUT_OF_MEMORY = 2
_LAZY_ENABLE_PEER_ACCESS = 1


class Refused(Exception):
    """The driver or torch rejected the operation; the text is the reason in a few words."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


class _Block:
    """Memory that torch views without a copy. It is freed with the last tensor in it."""

    def __init__(self, pointer: int, num_bytes: int, device: torch.device, give_back: Callable[[int], None]):
        self.pointer, self._device, self._give_back = pointer, device, give_back
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
        }

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at process exit the driver may be gone
            with torch.cuda.device(self._device):
                torch.cuda.synchronize()  # no kernel uses it any more
                self._give_back(self.pointer)


def allocate(num_bytes: int, device: torch.device) -> tuple[torch.Tensor, bytes]:
    """Allocate memory of `device`, uint8 [num_bytes]; returns it and its handle for other processes. Raises Refused."""
    driver, pointer, handle = _driver(), ctypes.c_uint64(), _Handle()
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # also makes the device's context current on this thread
        code = driver.cuMemAlloc_v2(ctypes.byref(pointer), num_bytes)
        if code == _OUT_OF_MEMORY:
            torch.cuda.empty_cache()
            code = driver.cuMemAlloc_v2(ctypes.byref(pointer), num_bytes)
        _check(driver, code)
        memory = _tensor(pointer.value, num_bytes, device, lambda at: driver.cuMemFree_v2(at))
        _check(driver, driver.cuIpcGetMemHandle(ctypes.byref(handle), pointer))
    return memory, bytes(handle)


def open_handle(handle: bytes, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Open memory that another process allocated, uint8 [num_bytes], for use on `device`. Raises Refused, for example without
    peer access to the GPU that has the memory."""
    if len(handle) != _HANDLE_BYTES:
        raise Refused(f"a handle has {_HANDLE_BYTES} bytes, not {len(handle)}")
    driver, pointer = _driver(), ctypes.c_uint64()
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        structure = _Handle.from_buffer_copy(handle)
        _check(driver, driver.cuIpcOpenMemHandle_v2(ctypes.byref(pointer), structure, _LAZY_ENABLE_PEER_ACCESS))
        return _tensor(pointer.value, num_bytes, device, lambda at: driver.cuIpcCloseMemHandle(at))


def uuid_of(device: torch.device) -> str:
    """The UUID of a GPU: the same in all processes, however CUDA_VISIBLE_DEVICES numbers their GPUs."""
    return str(torch.cuda.get_device_properties(device).uuid)


def current_device() -> torch.device:
    """The GPU of this thread."""
    return torch.device("cuda", torch.cuda.current_device())


def _tensor(pointer: int, num_bytes: int, device: torch.device, give_back: Callable[[int], None]) -> torch.Tensor:
    block = _Block(pointer, num_bytes, device, give_back)
    try:
        memory = torch.as_tensor(block, device=device)
    except (RuntimeError, ValueError, TypeError) as error:
        raise Refused(f"torch cannot use it: {error}") from error
    if memory.data_ptr() != pointer:  # a copy would miss later writes
        raise Refused(f"it is not memory of {device}")
    return memory


def _check(driver: ctypes.CDLL, code: int) -> None:
    if code:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(name))
        raise Refused((name.value or f"CUDA error {code}".encode()).decode())


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(_LIBRARY)
        pointer = ctypes.POINTER(ctypes.c_uint64)
        for name, arguments in {
            "cuMemAlloc_v2": [pointer, ctypes.c_size_t],
            "cuMemFree_v2": [ctypes.c_uint64],
            "cuIpcGetMemHandle": [ctypes.POINTER(_Handle), ctypes.c_uint64],
            "cuIpcOpenMemHandle_v2": [pointer, _Handle, ctypes.c_uint],
            "cuIpcCloseMemHandle": [ctypes.c_uint64],
            "cuGetErrorName": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
        }.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
    except (OSError, AttributeError) as error:
        raise Refused(f"no CUDA driver supports it: {error}") from error
    return library
