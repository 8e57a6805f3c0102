"""Weights of a frozen model in a file that is mapped into memory, in place of a resident copy.

The file holds the bits that the engine would hold, as they lie in memory, so that every forward reads them in place; a GPU
copies a layer at a time from it. Between two calls no page of it is resident; the system caches as much as is free, and reads
all further pages from the disk again.
"""

import logging
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from verl.config import full_key
from verl.errors import ConfigError

log = logging.getLogger(__name__)

_ALIGNMENT = 4096  # bytes of a page
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


class MappedWeights:
    """The tensors of a frozen model on the CPU, moved into a file below `folder` that ends with the process. `places` are the
    attributes (object, name) that hold them; tensors that share memory still do. Raises ConfigError on a full disk."""

    def __init__(self, places: Sequence[tuple[object, str]], folder: Path):
        tensors = [getattr(owner, name) for owner, name in places]
        storages = {s.data_ptr(): s for s in (t.untyped_storage() for t in tensors) if s.nbytes()}
        starts, size = {}, 0
        for address, storage in storages.items():
            starts[address], size = size, -(-(size + storage.nbytes()) // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = size
        self._map = _mapped_file(folder, size, [(starts[address], storage) for address, storage in storages.items()])
        stored = torch.frombuffer(self._map, dtype=torch.uint8)
        for (owner, name), t in zip(places, tensors, strict=True):
            if t.untyped_storage().nbytes() == 0:  # a rank's part of a tensor with few rows
                continue
            start = starts[t.untyped_storage().data_ptr()] + t.storage_offset() * t.element_size()
            assert t.is_contiguous()
            setattr(owner, name, stored[start : start + t.numel() * t.element_size()].view(t.dtype).view(t.shape))
        log.info("The reference's %.2f GB of weights are mapped from a file in %s.", size / 1e9, folder)
        self.release()

    def release(self) -> None:
        """Take the pages from this process; the next call reads them again."""
        self._map.madvise(mmap.MADV_DONTNEED)


def check_place(folder: Path, kind: str) -> None:
    """Raise ConfigError for a folder on a file system of `kind` that is in memory."""
    if kind in _IN_MEMORY:
        raise ConfigError(
            f"{full_key('ref.memory_map')}=True keeps the reference's weights in {folder}, which is {kind}: in memory "
            "too. Set trainer.default_local_dir to a folder on a disk."
        )


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
            return mmap.mmap(file.fileno(), max(1, size), flags=mmap.MAP_PRIVATE)
    except OSError as error:
        raise ConfigError(
            f"{full_key('ref.memory_map')}=True needs {size / 1e9:.2f} GB in {folder}: {error.strerror}. Free some space, "
            "or set trainer.default_local_dir to another disk."
        ) from error
