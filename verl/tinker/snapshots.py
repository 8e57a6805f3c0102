"""Weights of samplers, in files named by the digest of their content.

Equal weights are one file. A sampler of a checkpoint has a hard link to the checkpoint's file, so it outlives the checkpoint.
A file is removed when no sampler names it.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Collection
from pathlib import Path

from verl.checkpoint.files import record_of
from verl.checkpoint.tensor_files import read_tensors, write_tensors
from verl.models.adapter_weights import AdapterWeights
from verl.models.lora import own_names, peft_names
from verl.tinker.records import RefusedRequest
from verl.tracking.files import sync_folder


class Snapshots:
    """The weights below `root`. Hold `lock` from `write` or `link` until a sampler names the digest, and while unused files are
    removed."""

    def __init__(self, root: Path):
        self.root = root / "snapshots"
        self.root.mkdir(parents=True, exist_ok=True)
        self.lock = threading.Lock()

    def write(self, weights: AdapterWeights) -> str:
        """Save weights: their digest."""
        temporary = self.root / f".{os.getpid()}.tmp"
        temporary.unlink(missing_ok=True)
        try:
            digest = write_tensors(temporary, peft_names(weights.tensors)).blake2b
            os.replace(temporary, self._file(digest))
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(self.root)
        return digest

    def link(self, file: Path, digest: str) -> None:
        """Share the adapter file of a checkpoint, whose content has this digest."""
        if not self._file(digest).exists():
            try:
                os.link(file, self._file(digest))
            except OSError:  # a file system without links
                temporary = self.root / f".{digest}.tmp"
                shutil.copyfile(file, temporary)
                os.replace(temporary, self._file(digest))
            sync_folder(self.root)

    def load(self, digest: str) -> AdapterWeights:
        """The weights with this digest. Raises RefusedRequest where the file is gone or damaged."""
        file = self._file(digest)
        if not file.is_file() or record_of(file).blake2b != digest:
            raise RefusedRequest("The weights of this sampler are not on the server's disk any more.", 404)
        tensors = own_names(read_tensors(file))
        rank = next(value.shape[0] for name, value in tensors.items() if name.endswith(".lora_A"))
        return AdapterWeights(rank, tensors)

    def remove_unused(self, used: Collection[str]) -> None:
        """Remove the files that no sampler of `used` names."""
        for file in self.root.glob("*.safetensors"):
            if file.stem not in used:
                file.unlink(missing_ok=True)

    def _file(self, digest: str) -> Path:
        return self.root / f"{digest}.safetensors"
