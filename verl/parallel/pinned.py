"""Pinned memory of the host, in whole pages. torch's own allocator rounds a tensor of 1.1 GB up to 2 GiB."""

from __future__ import annotations

import logging
import mmap
import sys
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch

log = logging.getLogger(__name__)

_SMALLEST = 1 << 20  # bytes; torch allocates smaller tensors, of which a model has many
_idle: dict[int, list[_Block]] = defaultdict(list)  # by size; a run asks for the same sizes in each step


def page_lock(block: torch.Tensor) -> Callable[[], None]:
    """Pin `block`, memory of the host that torch did not allocate, in a process that uses a GPU. Returns the call that unpins
    it, due before the memory is freed. A failure is only a warning, since it only makes copies slower."""
    if not torch.cuda.is_initialized() or not block.numel():
        return lambda: None
    runtime = torch.cuda.cudart()
    if code := int(runtime.cudaHostRegister(block.data_ptr(), block.nbytes, 0)):
        log.warning("%d bytes of host memory cannot be pinned (CUDA error %d); copies to and from the GPU are slower.",
                    block.nbytes, code)  # fmt: skip
        return lambda: None
    return lambda: runtime.cudaHostUnregister(block.data_ptr())


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory of the host for a tensor like `tensor`, in a process that uses a GPU. A freed tensor leaves its memory to the next
    one of its size, behind the copies that the GPU has yet to make."""
    if tensor.nbytes < _SMALLEST or not tensor.is_contiguous():
        return torch.empty_like(tensor, device="cpu", pin_memory=True)
    return pinned_bytes(tensor.nbytes).view(tensor.dtype).view(tensor.shape)


def pinned_bytes(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes]."""
    size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    block = _idle[size].pop() if _idle[size] else _Block(-1, size)
    return torch.from_numpy(block.lent())[:num_bytes]


class _Block(mmap.mmap):
    """Pages that stay pinned. `used`: the work of a GPU behind which their next owner comes."""

    is_pinned = False
    used: torch.cuda.Event | None = None

    def lent(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """All bytes, for one owner."""
        if not self.is_pinned:
            page_lock(torch.frombuffer(self, dtype=torch.uint8))
            self.is_pinned = torch.cuda.is_initialized()
        if self.used is not None:
            self.used.synchronize()
        lease = np.frombuffer(self, np.uint8).view(_Lease)
        lease.block = self
        return lease


class _Lease(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """Bytes of a block, which is idle when the tensor on them is freed."""

    block: _Block | None = None

    def __del__(self) -> None:
        if self.block is None or sys.is_finalizing():
            return
        if torch.cuda.is_initialized():
            self.block.used = torch.cuda.current_stream().record_event()
        _idle[len(self.block)].append(self.block)
