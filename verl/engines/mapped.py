"""Weights of a frozen model in a file that is mapped into memory, in place of a resident copy.

The file holds the bits that the engine would hold, as they lie in memory, so that every forward reads them in place. Between
two calls no page of it is resident; the system caches as much as is free, and reads the rest from the disk again.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from verl.errors import ConfigError
from verl.models.cpu.weights import DenseDecoder

log = logging.getLogger(__name__)

_ALIGNMENT = 4096  # bytes of a page
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


class MappedWeights:
    """The parameters of `module`, which is frozen and on the CPU, moved into a file below `folder` that ends with the process.
    Raises ConfigError for a folder in memory, or on a full disk."""

    def __init__(self, module: Any, folder: Path, kind: str):
        if kind in _IN_MEMORY:
            raise ConfigError(
                f"actor_rollout_ref.ref.memory_map=True keeps the reference's weights in {folder}, which is {kind}: in memory "
                "too. Set trainer.default_local_dir to a folder on a disk."
            )
        DenseDecoder.of(module)  # which lays projections back to back: once mapped, they cannot move
        parameters = list(module.parameters())
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in parameters}
        starts, size = {}, 0
        for address, storage in storages.items():
            starts[address], size = size, -(-(size + storage.nbytes()) // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = size
        self._map = _mapped_file(folder, size, [(starts[address], storage) for address, storage in storages.items()])
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        with torch.no_grad():
            for p in parameters:
                start = starts[p.untyped_storage().data_ptr()] + p.storage_offset() * p.element_size()
                there = whole[start : start + p.numel() * p.element_size()].view(p.dtype)
                assert p.is_contiguous()
                p.data = there.view(p.shape)
        log.info("The reference's %.2f GB of weights are mapped from a file in %s.", size / 1e9, folder)
        self.release()

    def release(self) -> None:
        """Take the pages from this process; the next call reads them again."""
        self._map.madvise(mmap.MADV_DONTNEED)


def _mapped_file(folder: Path, size: int, parts: list[tuple[int, torch.UntypedStorage]]) -> mmap.mmap:
    """A private map of a new file without a name."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".reference-") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, size))
            for start, storage in parts:
                file.seek(start)
                file.write(torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data)
            file.flush()
            os.fsync(file.fileno())
            return mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE)
    except OSError as error:
        raise ConfigError(
            f"actor_rollout_ref.ref.memory_map=True needs {size / 1e9:.2f} GB in {folder}: {error.strerror}. Free some space, "
            "or set trainer.default_local_dir to another disk."
        ) from error
