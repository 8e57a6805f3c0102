"""Pinned memory of the host: as large as it must be, and reused behind the copies of a GPU."""

import mmap
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from tests.parallel.test_device import Runtime
from verl.parallel import pinned


class Event:
    """The end of copies of a simulated GPU."""

    def __init__(self, notes):
        self.notes = notes

    def synchronize(self):
        self.notes.append("waits")


@pytest.fixture
def runtime(monkeypatch):
    runtime, notes = Runtime(), []
    stream = SimpleNamespace(record_event=lambda: notes.append("records") or Event(notes))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(pinned, "_idle", defaultdict(list))
    runtime.notes = notes
    return runtime


@pytest.mark.parametrize("num_bytes", [(1 << 20) + 4, (5 << 20) - 8, 11 << 20])
def test_memory_is_of_whole_pages(runtime, num_bytes):
    """torch's allocator takes the next power of two."""
    like = torch.empty(num_bytes // 4, dtype=torch.float32)
    tensor = pinned.pinned_like(like)
    assert (tensor.shape, tensor.dtype) == (like.shape, like.dtype)
    ((_, address, size),) = runtime.calls
    assert address == tensor.data_ptr()
    assert num_bytes <= size < num_bytes + mmap.PAGESIZE


def test_freed_memory_is_reused_behind_the_copies_of_the_gpu(runtime):
    like = torch.empty(2, 1 << 18)
    first, second = pinned.pinned_like(like), pinned.pinned_like(like)
    part, address = first[1], first.data_ptr()
    del first
    assert pinned.pinned_like(like).data_ptr() != address, "a view still uses it"
    assert runtime.notes == ["records"], "of the tensor that nobody took"
    del part
    third = pinned.pinned_like(like)
    assert third.data_ptr() == address
    assert runtime.notes == ["records", "records", "waits"]
    assert len(runtime.calls) == 3
    assert second.data_ptr() != third.data_ptr()
