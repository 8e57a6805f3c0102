"""What ranks of one host give each other through memory that they share, instead of over a connection.

Every rank has an outbox of two halves, into which it writes what the others are to read, and sees those of its neighbours.
Which ranks are neighbours is found out by opening, since names of hosts can mislead where containers are at work.
"""

from __future__ import annotations

import mmap
import os
import socket

import torch

from verl.errors import ModelError, WorkerLostError
from verl.parallel.collectives import Collectives
from verl.parallel.wire import from_bytes, to_bytes
from verl.reshard.shared_memory import Segment, as_numbers, open_segment

_PROOF_BYTES = 16
_ALIGNMENT = 64  # bytes; of what lies in an outbox


def aligned(num_bytes: int) -> int:
    """What so many bytes take in an outbox."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class HostMemory:
    """Made by all ranks together. `readers` are the ranks that can read this one's outbox, `inboxes` the outboxes that it
    can read."""

    def __init__(self, comm: Collectives, half_bytes: int):
        """`half_bytes`: of a half of this rank's outbox; 0 where it has nothing to send."""
        self.half_bytes = aligned(half_bytes)
        proof = os.urandom(_PROOF_BYTES)
        mine = _outbox(2 * self.half_bytes) if self.half_bytes else None
        if mine is not None:
            mine.memory[:_PROOF_BYTES] = proof
        said = [from_bytes(row) for row in comm.all_gather(to_bytes(_card(mine, proof)))]
        self.inboxes = {
            rank: memory
            for rank, card in enumerate(said)
            if rank != comm.rank and card is not None and (memory := _opened(rank, *card)) is not None
        }
        opened = [from_bytes(row) for row in comm.all_gather(to_bytes(list(self.inboxes)))]
        self.readers = {rank for rank, outboxes in enumerate(opened) if comm.rank in outboxes}
        self._outbox = None if mine is None or not self.readers else mine.memory
        if mine is not None:
            mine.close()  # whoever can read it has it open

    @property
    def num_bytes(self) -> int:
        """Of this rank's outbox."""
        return 2 * self.half_bytes if self._outbox is not None else 0

    def room(self, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """`count` numbers of the outbox from byte `first` on."""
        assert self._outbox is not None
        return as_numbers(self._outbox, first, count * dtype.itemsize, dtype)

    def read(self, rank: int, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """`count` numbers of the outbox of `rank` from byte `first` on."""
        return as_numbers(self.inboxes[rank], first, count * dtype.itemsize, dtype)


def _outbox(num_bytes: int) -> Segment | None:
    try:
        return Segment(max(num_bytes, _PROOF_BYTES))
    except (ModelError, OSError):  # a system without it: everything goes over connections
        return None


def _card(segment: Segment | None, proof: bytes) -> tuple[str, str, int, bytes] | None:
    return None if segment is None else (socket.gethostname(), segment.path, segment.num_bytes, proof)


def _opened(rank: int, host: str, path: str, num_bytes: int, proof: bytes) -> mmap.mmap | None:
    """None for a rank of another host, or behind the walls of another container: there the path is nobody's, or leads to
    something else."""
    if host != socket.gethostname():
        return None
    try:
        memory = open_segment(path, num_bytes, f"The outbox of rank {rank}")
    except (ModelError, WorkerLostError, OSError, ValueError):
        return None
    return memory if memory[:_PROOF_BYTES] == proof else None
