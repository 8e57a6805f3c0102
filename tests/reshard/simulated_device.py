"""GPU memory, simulated by memory of the host that processes can share."""

import threading

import torch

from verl.parallel.segments import SharedSegment, open_segment
from verl.reshard import cuda_ipc, device_memory
from verl.reshard.cuda_ipc import Refused

DEVICE = torch.device("cpu")


class SimulatedDriver:
    """`refuses` are the calls that fail; `opened` has a pair of devices for each call that did not: where the memory is, and
    from where it was opened. `thread.device` is the device of a thread."""

    def __init__(self):
        self.refuses, self.opened, self.segments, self.thread = set(), [], [], threading.local()
        self.devices = {}

    def allocate(self, num_bytes, device):
        if "allocate" in self.refuses:
            raise Refused("CUDA_ERROR_OUT_OF_MEMORY")
        self.segments.append(SharedSegment(num_bytes))
        self.devices[self.segments[-1].path] = device
        return self.segments[-1].values, self.segments[-1].path.encode()

    def open_handle(self, handle, num_bytes, device):
        if "open" in self.refuses:
            raise Refused("CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")
        self.opened.append((self.devices[handle.decode()], device))
        return open_segment(handle.decode(), num_bytes, "it")


class Forgetful(dict):
    def __setitem__(self, key, value):
        pass


def simulate_driver(monkeypatch):
    """Puts a SimulatedDriver in place of CUDA's, and lets this process open its own memory as if it were another's."""
    driver = SimulatedDriver()
    monkeypatch.setattr(cuda_ipc, "allocate", driver.allocate)
    monkeypatch.setattr(cuda_ipc, "open_handle", driver.open_handle)
    monkeypatch.setattr(cuda_ipc, "uuid_of", lambda device: f"GPU-{device.index or 0}")
    monkeypatch.setattr(cuda_ipc, "current_device", lambda: getattr(driver.thread, "device", DEVICE))
    monkeypatch.setattr(device_memory, "_OWN", Forgetful())
    return driver
