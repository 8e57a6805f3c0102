"""Weights of samplers, which never change, in files named by their content."""

import os
import threading
from collections.abc import Collection
from pathlib import Path

from verl.checkpoint.tensor_files import read_tensors, write_tensors
from verl.manifest import put_in_place, record_of
from verl.models.adapter_weights import AdapterWeights
from verl.models.lora import own_names, peft_names
from verl.regular_files import make_folder, sync_folder
from verl.tinker.checkpoints import link_or_copy, warn_once
from verl.tinker.records import RefusedRequest


class Snapshots:
    """Weights of samplers below `root`, in files named by the digest of their content. A sampler of a checkpoint has a hard
    link to its file and outlives the checkpoint. Hold `lock` from `write` or `link` until a sampler names the digest, and
    while unused files are removed."""

    def __init__(self, root: Path):
        self.root = root / "snapshots"
        make_folder(self.root)
        self.lock = threading.Lock()

    def write(self, weights: AdapterWeights) -> str:
        """Save weights: their digest."""
        temporary = self.root / f".{os.getpid()}.tmp"
        temporary.unlink(missing_ok=True)
        try:
            tensors = peft_names(weights.tensors) if weights.rank else weights.tensors
            digest = write_tensors(temporary, tensors).blake2b
            put_in_place(temporary, self._file(digest))
        finally:
            temporary.unlink(missing_ok=True)
        return digest

    def link(self, file: Path, digest: str) -> None:
        """Share the adapter file of a checkpoint; `digest` is that of its content."""
        if not self._file(digest).exists():
            link_or_copy(file, self._file(digest))
            sync_folder(self.root)

    def num_bytes(self, digests: Collection[str]) -> int:
        """Bytes of the files with these digests."""
        return sum(file.stat().st_size for file in map(self._file, digests) if file.is_file())

    def load(self, digest: str) -> AdapterWeights:
        """The weights with this digest. Raises RefusedRequest if the file is gone or damaged."""
        file = self._file(digest)
        if not file.is_file():
            raise RefusedRequest("The weights of this sampler are not on the server's disk any more.", 404)
        if record_of(file).blake2b != digest:
            warn_once(f"{file} does not have the content that was saved (its digest differs).")
            raise RefusedRequest(
                "The weights of this sampler are damaged. Create another from a checkpoint or a model."
            )
        tensors = own_names(read_tensors(file))
        rank = next((value.shape[0] for name, value in tensors.items() if name.endswith(".lora_A")), 0)
        return AdapterWeights(rank, tensors)

    def remove_unused(self, used: Collection[str]) -> None:
        """Remove the files that no sampler of `used` names."""
        for file in self.root.glob("*.safetensors"):
            if file.stem not in used:
                file.unlink(missing_ok=True)

    def _file(self, digest: str) -> Path:
        return self.root / f"{digest}.safetensors"
