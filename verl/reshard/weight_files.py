"""New weights as files, for engines that can only read a folder: safetensors with an index, and a description with digests.

description = write_folder(run / "weights", 3, weights, 1 << 30)      # of .../version-3; it appears atomically
for name, tensor in read_folder(description): ...
"""

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

_INDEX = "model.safetensors.index.json"


def write_folder(folder: Path, number: int, tensors: Iterable[Named], bucket_bytes: int) -> dict[str, Any]:
    """Write `tensors` [any shape, any device] of update `number` to a new folder under `folder`, and describe it in JSON:
    `folder`, and `entries` with name, file and digest. Files have at most `bucket_bytes` (a larger tensor gets its own), and
    one is in memory at a time. Folders of other updates, version-N, are removed afterwards.

    Raises ModelError when the folder cannot be written.
    """
    done, draft = folder / f"version-{number}", folder / f".draft-{number}-{os.getpid()}"
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        entries = _write(draft, tensors, bucket_bytes)
        shutil.rmtree(done, ignore_errors=True)
        draft.rename(done)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise ModelError(
            f"Version {number} of the weights could not be written to {folder}: {error}. Free some space, or choose another "
            "folder."
        ) from error
    for other in folder.glob("version-*"):
        if other != done and other.name.removeprefix("version-").isdigit():
            shutil.rmtree(other, ignore_errors=True)
    return {"folder": str(done), "entries": entries}


def read_folder(description: dict[str, Any]) -> Iterator[Named]:
    """The tensors of a described folder, in the order of writing, each verified before it is yielded. Raises
    ModelError when a tensor is missing or does not match its digest."""
    for entry in description["entries"]:
        yield entry["name"], _read(Path(description["folder"]), entry)


def _write(draft: Path, tensors: Iterable[Named], bucket_bytes: int) -> list[dict[str, str]]:
    entries: list[dict[str, str]] = []
    num_bytes = 0
    for number, some in enumerate(bucketed(tensors, bucket_bytes)):
        file = f"model-{number:05d}.safetensors"
        on_host = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in some}
        save_file(on_host, draft / file, metadata={"format": "pt"})
        entries += [{"name": name, "file": file, "digest": _digest(name, tensor)} for name, tensor in on_host.items()]
        num_bytes += sum(tensor.nbytes for tensor in on_host.values())
    weight_map = {entry["name"]: entry["file"] for entry in entries}
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (draft / _INDEX).write_text(json.dumps(index), encoding="utf-8")
    return entries


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
