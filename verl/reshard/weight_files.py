"""New weights as files, for engines that can only read a folder: safetensors with an index, and a manifest of digests.

folder = write_files(run / "weights", 3, weights, 1 << 30)      # .../version-3, atomically
for name, tensor in read_files(run / "weights", 3): ...
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from verl.errors import ModelError
from verl.reshard.digest import digest
from verl.reshard.shared_memory import Named, bucketed

MANIFEST = "weights.json"
_INDEX = "model.safetensors.index.json"


def write_files(folder: Path, version: int, tensors: Iterable[Named], bucket_bytes: int) -> Path:
    """Write `tensors` [any shape, any device] to a new folder under `folder`, and return it. Files have at most `bucket_bytes`
    (a larger tensor gets its own), and one is in memory at a time. Other versions are removed afterwards.

    Raises ModelError when the folder cannot be written.
    """
    done, draft = folder / f"version-{version}", folder / f".draft-{version}-{os.getpid()}"
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        _write(draft, version, tensors, bucket_bytes)
        shutil.rmtree(done, ignore_errors=True)
        draft.rename(done)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise ModelError(
            f"Version {version} of the weights could not be written to {folder}: {error}. Free some space, or choose another "
            "folder."
        ) from error
    for other in folder.glob("version-*"):
        if other != done:
            shutil.rmtree(other, ignore_errors=True)
    return done


def read_files(folder: Path, version: int) -> Iterator[Named]:
    """The tensors of a version, in the order in which they were written, each verified before it is yielded.

    Raises ModelError when the version is missing, or a tensor is missing or does not match its digest.
    """
    place = folder / f"version-{version}"
    try:
        manifest = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        there = ", ".join(sorted(path.name for path in folder.glob("version-*"))) or "none"
        raise ModelError(
            f"Version {version} of the weights is not in {folder} (present: {there}); write it again, or request another."
        ) from error
    if manifest["version"] != version:
        raise ModelError(f"{place} holds version {manifest['version']} of the weights: write version {version} again.")
    for entry in manifest["tensors"]:
        yield entry["name"], _read(place, entry)


def _write(draft: Path, version: int, tensors: Iterable[Named], bucket_bytes: int) -> None:
    entries: list[dict[str, object]] = []
    num_bytes = 0
    for number, some in enumerate(bucketed(tensors, bucket_bytes)):
        file = f"model-{number:05d}.safetensors"
        here = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in some}
        save_file(here, draft / file, metadata={"format": "pt"})
        entries += [{"name": name, "file": file, "digest": _digest(name, tensor)} for name, tensor in here.items()]
        num_bytes += sum(tensor.nbytes for tensor in here.values())
    weight_map = {entry["name"]: entry["file"] for entry in entries}
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (draft / _INDEX).write_text(json.dumps(index), encoding="utf-8")
    (draft / MANIFEST).write_text(json.dumps({"version": version, "tensors": entries}), encoding="utf-8")


def _read(place: Path, entry: dict[str, Any]) -> torch.Tensor:
    try:
        with safe_open(place / entry["file"], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(entry["name"])
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{entry['name']} cannot be read from {place / entry['file']} ({error}). These weights must not be used: write "
            "them again."
        ) from error
    if _digest(entry["name"], tensor) != entry["digest"]:
        raise ModelError(
            f"{entry['name']} in {place / entry['file']} does not match its digest. These weights must not be used: write them "
            "again."
        )
    return tensor


def _digest(name: str, tensor: torch.Tensor) -> str:
    return digest(f"{name} {list(tensor.shape)}", tensor).hex()
