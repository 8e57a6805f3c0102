"""Memory of a GPU, played by memory of the host that processes can share."""

import torch

from verl.reshard import cuda_ipc, device_memory
from verl.reshard.cuda_ipc import Refused
from verl.reshard.shared_memory import Segment, as_numbers, open_segment

DEVICE = torch.device("cpu")


class PlayedDriver:
    """`refuses` are the calls that fail."""

    def __init__(self):
        self.refuses, self.opened, self.segments = set(), 0, []

    def allocate(self, num_bytes, device):
        if "allocate" in self.refuses:
            raise Refused("CUDA_ERROR_OUT_OF_MEMORY")
        self.segments.append(Segment(num_bytes))
        memory = as_numbers(self.segments[-1].memory, 0, num_bytes, torch.uint8)
        return memory, self.segments[-1].path.encode()

    def open_handle(self, handle, num_bytes, device):
        self.opened += 1
        if "open" in self.refuses:
            raise Refused("CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")
        return as_numbers(open_segment(handle.decode(), num_bytes, "it"), 0, num_bytes, torch.uint8)


class Forgetful(dict):
    def __setitem__(self, key, value):
        pass


def play_driver(monkeypatch):
    """Puts a PlayedDriver in the place of CUDA's, and lets this process open its own memory as if it were another's."""
    played = PlayedDriver()
    monkeypatch.setattr(cuda_ipc, "allocate", played.allocate)
    monkeypatch.setattr(cuda_ipc, "open_handle", played.open_handle)
    monkeypatch.setattr(cuda_ipc, "uuid_of", lambda device: "GPU-1")
    monkeypatch.setattr(cuda_ipc, "device_with", lambda uuid: DEVICE)
    monkeypatch.setattr(device_memory, "_OWN", Forgetful())
    return played
