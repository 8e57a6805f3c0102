"""The calls of CUDA's driver behind memory that processes share, on a driver that is simulated call by call: on which device,
in which order, and what is given back."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from verl.reshard import cuda_ipc
from verl.reshard.cuda_ipc import Refused

NUM_BYTES = 64
HANDLE = b"h" * 64


class FakeDriver:
    """`calls` are names of calls with the device that is current; `codes` the next results of a call, else it succeeds."""

    def __init__(self):
        self.calls, self.codes, self.device = [], {}, None
        self.memory = (ctypes.c_ubyte * NUM_BYTES)()

    def note(self, call):
        self.calls.append((call, self.device))
        return (self.codes.get(call) or [0]).pop(0)

    def cuMemAlloc_v2(self, pointer, num_bytes):  # noqa: N802
        code = self.note("allocate")
        pointer._obj.value = 0 if code else ctypes.addressof(self.memory)
        return code

    def cuIpcGetMemHandle(self, handle, pointer):  # noqa: N802
        ctypes.memmove(handle, HANDLE, len(HANDLE))
        return self.note("handle")

    def cuIpcOpenMemHandle_v2(self, pointer, handle, flags):  # noqa: N802
        assert bytes(handle) == HANDLE
        code = self.note("open")
        pointer._obj.value = 0 if code else ctypes.addressof(self.memory)
        return code

    def cuMemFree_v2(self, pointer):  # noqa: N802
        return self.note("free")

    def cuIpcCloseMemHandle(self, pointer):  # noqa: N802
        return self.note("close")

    def cuGetErrorName(self, code, name):  # noqa: N802
        name._obj.value = {2: b"CUDA_ERROR_OUT_OF_MEMORY", 217: b"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"}[code]
        return 0


class CurrentDevice:
    def __init__(self, driver, device):
        self.driver, self.device = driver, device

    def __enter__(self):
        self.before, self.driver.device = self.driver.device, self.device

    def __exit__(self, *error):
        self.driver.device = self.before


@pytest.fixture
def driver(monkeypatch):
    driver = FakeDriver()

    def as_tensor(block, device):
        interface = block.__cuda_array_interface__
        assert interface["data"] == (ctypes.addressof(driver.memory), False)
        tensor = torch.frombuffer(driver.memory, dtype=torch.uint8)
        driver.block = block  # as a tensor of torch does, until the test drops it
        return tensor

    cuda = SimpleNamespace(
        device=lambda device: CurrentDevice(driver, device),
        synchronize=lambda: driver.note("synchronize"),
        empty_cache=lambda: driver.note("empty cache"),
    )
    monkeypatch.setattr(cuda_ipc, "_driver", lambda: driver)
    monkeypatch.setattr(cuda_ipc, "torch", SimpleNamespace(cuda=cuda, as_tensor=as_tensor, Tensor=torch.Tensor))
    return driver


GPU = torch.device("cuda", 3)


def names(driver):
    assert {device for _, device in driver.calls} == {GPU}, "each call is of that GPU's context"
    return [call for call, _ in driver.calls]


def test_memory_is_freed_on_its_gpu_after_the_kernels_that_use_it(driver):
    memory, handle = cuda_ipc.allocate(NUM_BYTES, GPU)
    assert (memory.nbytes, handle) == (NUM_BYTES, HANDLE)
    assert names(driver) == ["synchronize", "allocate", "handle"]
    driver.calls.clear()
    del memory, driver.block
    assert names(driver) == ["synchronize", "free"]


def test_memory_of_another_process_is_closed_and_not_freed(driver):
    memory = cuda_ipc.open_handle(HANDLE, NUM_BYTES, GPU)
    assert names(driver) == ["synchronize", "open"]
    driver.calls.clear()
    del memory, driver.block
    assert names(driver) == ["synchronize", "close"]


def test_what_the_allocator_keeps_is_given_back_before_memory_is_short(driver):
    driver.codes = {"allocate": [2, 0]}
    assert cuda_ipc.allocate(NUM_BYTES, GPU)[0].nbytes == NUM_BYTES
    assert names(driver)[:4] == ["synchronize", "allocate", "empty cache", "allocate"]
    driver.codes = {"allocate": [2, 2]}
    with pytest.raises(Refused, match="CUDA_ERROR_OUT_OF_MEMORY"):
        cuda_ipc.allocate(NUM_BYTES, GPU)


def test_a_gpu_that_cannot_open_it_says_why(driver):
    driver.codes = {"open": [217]}
    with pytest.raises(Refused, match="CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"):
        cuda_ipc.open_handle(HANDLE, NUM_BYTES, GPU)
    assert names(driver) == ["synchronize", "open"], "nothing is closed"
